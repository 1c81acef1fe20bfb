//! Conversations: chat templates, the formats that hold messages, and which of their tokens are trained.

mod boundaries;
mod conversation;
mod encoder;
mod jinja;
mod marks;
mod notes;
mod prompt;
mod python_filters;
mod python_methods;
mod python_values;
mod renderer;
mod rows;
#[cfg(test)]
mod rows_tests;
mod scan;
#[cfg(test)]
mod scan_tests;
mod spans;
mod template;
mod template_files;
#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod template_tests;

pub(super) use encoder::ChatEncoder;
pub(super) use notes::ChatNotes;
pub(super) use rows::{is_conversational, prompt_and_completion, sample, shown, wrong};
pub(super) use spans::ChatSample;

pub use conversation::{Conversation, message, tools_of};
pub use prompt::ChatPrompt;
pub use renderer::{become_renderer, render_in_children_of};
pub use template::TemplateFault;
pub use template_files::{ChatTemplates, special_tokens};
