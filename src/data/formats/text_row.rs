//! A row as a prompt and its answers.

pub(super) struct TextRow {
    pub(super) prompt: String,
    pub(super) completion: String,
    /// The right answers; at least one.
    pub(super) references: Vec<String>,
}
