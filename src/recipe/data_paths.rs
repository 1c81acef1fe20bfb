//! What names data files: a path, a pattern or a folder, or several of these.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use toml::Value;

use super::diagnose::Checked;
use super::tree::Document;
use super::value::RecipeValue;
use super::words::forms;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DataPaths(Vec<PathBuf>);

impl DataPaths {
    pub fn named_by(&self, name: impl Fn(&PathBuf) -> PathBuf) -> Self {
        Self(self.0.iter().map(name).collect())
    }

    pub fn paths(&self) -> &[PathBuf] {
        &self.0
    }
}

impl<P: AsRef<Path>> From<P> for DataPaths {
    fn from(path: P) -> Self {
        Self(vec![path.as_ref().to_path_buf()])
    }
}

impl fmt::Display for DataPaths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |path: &PathBuf| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        f.write_str(&self.0.iter().map(name).collect::<Vec<_>>().join(", "))
    }
}

impl RecipeValue for DataPaths {
    fn takes(_: Option<&str>) -> String {
        "path, folder or pattern, or an array of these".to_owned()
    }

    fn to_value(&self) -> Option<Value> {
        match &self.0[..] {
            [path] => path.to_value(),
            paths => Some(Value::Array(paths.iter().filter_map(RecipeValue::to_value).collect())),
        }
    }

    fn checked(self, document: &Document, key: &str) -> Checked<Self> {
        document.distinct(key, &self.0, 1, "name each file once")?;
        self.0.into_iter().map(|path| path.checked(document, key)).collect::<Checked<_>>().map(Self)
    }
}

forms! {
    DataPaths: "a path or an array of paths";
    word<E> |path| Ok(DataPaths::from(path));
    list |paths: Vec<PathBuf>| DataPaths(paths);
}
