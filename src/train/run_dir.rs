//! Names in the directory of a run.

/// Name of the recipe in a run's directory.
pub const RESOLVED_RECIPE: &str = "recipe.resolved.toml";
