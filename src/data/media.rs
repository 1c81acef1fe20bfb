//! The kinds of content beside text that other trainers read, by the words that columns and parts of messages are named with.

pub(super) const MEDIA: [&str; 3] = ["image", "audio", "video"];

/// The name of what a part of a message holds, where that is no text.
pub(super) fn part_of_media(part: &serde_json::Map<String, serde_json::Value>) -> Option<&str> {
    let is_media = |name: &&str| MEDIA.iter().any(|kind| name.contains(kind)) || matches!(*name, "file" | "input_file");
    match part.get("type").and_then(serde_json::Value::as_str) {
        Some("text") => None,
        Some(name) => Some(name).filter(is_media),
        None => part.keys().map(String::as_str).find(is_media),
    }
}
