//! Power that is lost after any operation on the disk: what was not made durable by then is gone, and the run goes on to the same end.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use kvtune::checkpoint;
use serde_json::Value;

use super::workshop::{Workshop, ended, finetune_arguments};

/// Four short steps, of which the intermediate ones go; the best is replaced on the way.
const SET: &[&str] = &[
    "train.max_steps=4",
    "train.gradient_accumulation_steps=1",
    "eval.interval=2",
    "checkpoint.save_interval=3",
    "checkpoint.intermediate_save_keep=1",
];

/// What a disk knows: as programs see it now, and as it would be after a loss of power.
struct Disk {
    nodes: Vec<Node>,
    open: BTreeMap<u64, usize>,
}

enum Node {
    Dir { now: BTreeMap<String, usize>, kept: BTreeMap<String, usize> },
    File { now: Vec<u8>, kept: Vec<u8> },
}

/// The files of a directory, by their paths in it.
type Image = BTreeMap<PathBuf, Vec<u8>>;

impl Disk {
    /// An empty directory, which is the first node.
    fn new() -> Self {
        Self { nodes: vec![Node::Dir { now: BTreeMap::new(), kept: BTreeMap::new() }], open: BTreeMap::new() }
    }

    /// The directory that a path lies in, and its name there; nothing where the directory is unknown.
    fn place(&self, path: &Path) -> Option<(usize, String)> {
        let mut at = 0;
        for name in path.parent()? {
            let Node::Dir { now, .. } = &self.nodes[at] else { return None };
            at = *now.get(name.to_str()?)?;
        }
        Some((at, path.file_name()?.to_str()?.to_owned()))
    }

    fn names(&mut self, dir: usize) -> &mut BTreeMap<String, usize> {
        let Node::Dir { now, .. } = &mut self.nodes[dir] else { panic!("not a directory") };
        now
    }

    fn add(&mut self, (dir, name): (usize, String), node: Node) -> usize {
        self.nodes.push(node);
        let number = self.nodes.len() - 1;
        self.names(dir).insert(name, number);
        number
    }

    /// An operation with the paths in it, which are relative to the root; those elsewhere have none.
    fn apply(&mut self, line: &Value, path: impl Fn(&str) -> Option<PathBuf>) {
        let at = |disk: &Self, key: &str| disk.place(&path(line[key].as_str()?)?);
        let file = |disk: &Self| disk.open.get(&line["file"].as_u64()?).copied();
        match line["op"].as_str().unwrap() {
            "open" => {
                let Some(place) = at(self, "path") else { return };
                let known = self.names(place.0).get(&place.1).copied();
                let node = known.unwrap_or_else(|| self.add(place, Node::File { now: Vec::new(), kept: Vec::new() }));
                self.open.insert(line["file"].as_u64().unwrap(), node);
            }
            "make_dir" => {
                if let Some(place) = at(self, "path") {
                    self.add(place, Node::Dir { now: BTreeMap::new(), kept: BTreeMap::new() });
                }
            }
            "write" | "truncate" | "sync" => {
                let Some(Node::File { now, kept }) = file(self).map(|node| &mut self.nodes[node]) else { return };
                match (&line["bytes"], &line["len"]) {
                    (Value::String(bytes), _) => now.extend(bytes.chars().map(|c| u8::try_from(c).unwrap())),
                    (_, Value::Number(len)) => now.resize(len.as_u64().unwrap() as usize, 0),
                    _ => kept.clone_from(now),
                }
            }
            "sync_dir" => {
                let Some((dir, name)) = at(self, "path") else { return };
                let node = self.names(dir)[&name];
                let Node::Dir { now, kept } = &mut self.nodes[node] else { panic!("not a directory") };
                kept.clone_from(now);
            }
            "rename" | "exchange" => {
                let (Some(from), Some(to)) = (at(self, "from"), at(self, "to")) else { return };
                let moved = self.names(from.0).remove(&from.1).unwrap();
                let replaced = self.names(to.0).insert(to.1, moved);
                if line["op"] == "exchange" {
                    self.names(from.0).insert(from.1, replaced.unwrap());
                }
            }
            "remove" => {
                if let Some((dir, name)) = at(self, "path") {
                    self.names(dir).remove(&name).unwrap();
                }
            }
            other => panic!("{other}"),
        }
    }

    /// What power that is lost now leaves of a directory: contents that were synced, under names that were; or under all names that were
    /// given, as a disk may be ahead with them.
    fn left(&self, with_all_names: bool) -> Image {
        let mut image = Image::new();
        self.collect(0, Path::new(""), with_all_names, &mut image);
        image
    }

    fn collect(&self, node: usize, path: &Path, with_all_names: bool, image: &mut Image) {
        match &self.nodes[node] {
            Node::File { kept, .. } => drop(image.insert(path.to_owned(), kept.clone())),
            Node::Dir { now, kept } => {
                let names = if with_all_names { now } else { kept };
                for (name, node) in names {
                    self.collect(*node, &path.join(name), with_all_names, image);
                }
            }
        }
    }
}

fn write(image: &Image, dir: &Path) {
    for (path, bytes) in image {
        let path = dir.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

#[test]
fn lost_after_any_operation_the_newest_durable_checkpoint_is_found_and_the_end_is_the_same() {
    let workshop = Workshop::new(8);
    let whole = workshop.finished("whole", SET);
    let log = workshop.path("disk.log");
    let recorded = workshop.command("", &finetune_arguments("run", SET)).env("KVTUNE_DISK_LOG", &log).spawn().unwrap();
    ended(recorded).with(0);
    let text = fs::read_to_string(&log).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.len() > 250, "{}", lines.len());
    let root = workshop.path("");
    let inside = |path: &str| Some(root.join(path).strip_prefix(&root).ok()?.to_owned());

    let mut disk = Disk::new();
    // The directory of the test itself is durable.
    let (mut seen, mut images) = ([Image::new(), Image::new()], Vec::new());
    let (mut begun, mut promised) = (0, 0);
    for (number, line) in lines.iter().enumerate() {
        let step_begins = line["path"]
            .as_str()
            .filter(|_| line["op"] == "make_dir")
            .and_then(|path| Some(path.split("step-").nth(1)?.get(..6)?.parse::<u64>().unwrap()));
        if let Some(step) = step_begins {
            // Whoever begins a save has ended the one before.
            (begun, promised) = (step, begun);
        }
        disk.apply(line, inside);
        for (seen, with_all_names) in seen.iter_mut().zip([false, true]) {
            let image = disk.left(with_all_names);
            if image == *seen {
                continue;
            }
            seen.clone_from(&image);
            let name = format!("lost-{number}-{with_all_names}");
            write(&image, &workshop.path(&name));
            let run = workshop.path(&name).join("run");
            let found = match checkpoint::newest(&run) {
                Ok(found) => checkpoint::state_of(&found.dir).unwrap().unwrap().step,
                Err(error) if error.to_string().contains("has no valid checkpoint") || error.io().is_some() => 0,
                Err(error) => panic!("{number}: {error}"),
            };
            assert!(found >= promised, "{number}: step {found}, {promised} was promised");
            images.push(name);
        }
    }
    assert_eq!((begun, promised >= 3), (4, true));
    assert!(images.len() > 100, "{}", images.len());
    // `KVTUNE_EVERY_LOSS` tries them all.
    let stride = if std::env::var_os("KVTUNE_EVERY_LOSS").is_some() { 1 } else { images.len().div_ceil(8) };
    for name in images.iter().skip(stride - 1).step_by(stride) {
        let run = format!("{name}/run");
        if !workshop.path(&run).join("recipe.resolved.toml").exists() {
            assert!(workshop.resume("", &run, &[]).with(2).contains("not the directory of a run"));
            continue;
        }
        let resumed = workshop.resume("", &run, &[]);
        assert_eq!(resumed.code, Ok(0), "{name}: {}", resumed.stderr);
        assert!(!resumed.stderr.contains("damaged`"), "{name}: {}", resumed.stderr);
        let left = workshop.left(&run);
        assert_eq!(left.metrics, whole.metrics, "{name}");
        for (file, bytes) in &whole.files {
            // What was intermediate may have gone before the loss, or after it.
            assert!(left.files.get(file).is_some_and(|found| found == bytes), "{name}: `{file}`");
        }
    }
}
