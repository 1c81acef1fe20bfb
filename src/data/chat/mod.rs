//! Conversations: chat templates, the formats that hold messages, and which of their tokens are trained.

mod conversation;
mod markers;
mod python_filters;
mod python_methods;
mod python_values;
mod scan;
mod template;
mod template_files;

pub use conversation::{Conversation, message, tools_of};
pub use template_files::{ChatTemplates, special_tokens};
