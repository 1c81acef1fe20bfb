//! `report`: one page that needs nothing outside of itself, whatever stands in the files that it shows.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use insta::assert_snapshot;
use serde_json::json;

use super::place::Place;

const HOSTILE: &str = "</pre></svg><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u{0}\u{1b}[31m\u{202e}]]>--><!--";

/// Two runs, one with names, answers and a recipe that would break out of the page; scores and a log.
fn compared() -> Place {
    let place = Place::new();
    place.finetune(&[]).done();
    place.run(&["evaluate", "run", "--split", "train", "--device", "cpu", "--replay-log", "log", "--limit", "2"]).done();
    let scores = ["evaluate", "run", "--split", "train", "--device", "cpu", "--format", "json"];
    place.write("scores.jsonl", place.run(&scores).done().out);
    let other = "<b onclick=\"x\">&'";
    let copy = |from: &Path, to: &Path| {
        fs::create_dir(to).unwrap();
        for file in fs::read_dir(from).unwrap().map(Result::unwrap).filter(|file| file.path().is_file()) {
            fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    };
    copy(&place.path("run"), &place.path(other));
    copy(&place.path("run/final"), &place.path(other).join("final"));
    let recipe = String::from_utf8(place.read("run/recipe.resolved.toml")).unwrap();
    let comment = HOSTILE.replace(['\u{0}', '\u{1b}'], "");
    place.write(&format!("{other}/recipe.resolved.toml"), format!("# {comment}\n{}", recipe.replace("\"h2o\"", "\"lastrec\"")));
    let answer = |sample: u64| {
        let row = json!({
            "sample": sample, "prompt_hash": HOSTILE, "prediction": HOSTILE, "references": [HOSTILE, "\n"], "token_ids": [],
            "finish_reason": HOSTILE, "scores": { HOSTILE: 0.5 }, "settings": { HOSTILE: HOSTILE },
        });
        format!("{row}\n")
    };
    fs::create_dir(place.path(other).join("answers")).unwrap();
    place.write(&format!("{other}/answers/final-<i>.jsonl"), (0..12).map(answer).collect::<String>() + "{\"cut");
    place.write(
        "hostile.jsonl",
        json!({ "evaluated": HOSTILE, "policy": HOSTILE, "cache_length": HOSTILE,
        "scores": { "overall": { "loss": 1.5 } }, "answers": { "means": { HOSTILE: 0.25 } } })
        .to_string(),
    );
    let scores = ["--scores", "scores.jsonl", "--scores", "hostile.jsonl"];
    place.run(&[&["report", "run", other, "--out", "page.html", "--evictions", "log"][..], &scores].concat()).done();
    place
}

/// Panics unless every element is closed in its order; returns the elements' names.
fn elements(page: &str) -> Vec<String> {
    let (mut open, mut names): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    let mut rest = page.split_once("</style>").unwrap().1;
    while let Some((_, from)) = rest.split_once('<') {
        let (tag, behind) = from.split_once('>').unwrap();
        let name = |text: &str| text.split([' ', '\n']).next().unwrap().to_owned();
        if let Some(closed) = tag.strip_prefix('/') {
            // The head's elements before the style are left out.
            assert!(open.pop().is_none_or(|last| last == closed), "{closed} at {}", &behind[..behind.len().min(200)]);
        } else {
            names.push(name(tag));
            if !tag.ends_with('/') {
                open.push(name(tag));
            }
        }
        rest = behind;
    }
    assert!(open.is_empty(), "{open:?}");
    names
}

#[test]
fn nothing_breaks_out_of_the_page_and_nothing_is_fetched() {
    let place = compared();
    let page = String::from_utf8(place.read("page.html")).unwrap();
    let names = elements(&page);
    let known = "body main header h1 h2 h3 h4 p nav a section div table caption thead tbody tr th td ul li svg title desc path line \
                 circle text image rect article dl dt dd pre span";
    assert!(names.iter().all(|name| known.split_whitespace().any(|known| known == name)), "{names:?}");
    assert!(names.iter().filter(|name| *name == "svg").count() >= 7);
    for forbidden in ["<script", "<img", "onclick=\"", "<!--", "src=", "url(", "@import", "\u{0}", "\u{1b}", "\u{202e}"] {
        assert!(!page.contains(forbidden) || (forbidden == "src=" && !page.contains("src=\"")), "{forbidden}");
    }
    assert_eq!(
        page.matches("http").count(),
        page.matches("http-equiv").count() + page.matches("http://www.w3.org/2000/svg").count()
    );
    assert_eq!(page.matches("<table").count(), page.matches("<caption>").count());
    for words in [
        "2 runs compared",
        "&lt;b onclick=&quot;x&quot;&gt;",
        "kv_cache.policy",
        "&quot;lastrec&quot;",
        "The first 8 of 12 answers",
        "Which tokens the caches kept",
        "&lt;script&gt;alert(1)",
        "prefers-color-scheme: dark",
        "@media print",
    ] {
        assert!(page.contains(words), "{words}");
    }
    // Each id is one element's own.
    let ids: Vec<&str> = page.split(" id=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    let mut different = ids.clone();
    different.sort_unstable();
    different.dedup();
    assert_eq!(ids.len(), different.len(), "{ids:?}");
}

#[test]
fn a_run_that_has_just_begun_has_empty_charts() {
    let place = Place::new();
    place.finetune(&[]).done();
    for entry in ["metrics.jsonl", "summary.md"] {
        fs::remove_file(place.path("run").join(entry)).unwrap();
    }
    for name in place.names("run").iter().filter(|name| place.path("run").join(name).is_dir()) {
        fs::remove_dir_all(place.path("run").join(name)).unwrap();
    }
    // A link that lies in a run is nothing that the user has named.
    place.write("mine.html", "mine");
    std::os::unix::fs::symlink("../mine.html", place.path("run/report.html")).unwrap();
    assert_eq!(place.run(&["report", "run"]).done().out, "report: run/report.html\n");
    assert_eq!(place.read("mine.html"), b"mine");
    let page = String::from_utf8(place.read("run/report.html")).unwrap();
    elements(&page);
    assert!(page.matches(">no figures</text>").count() == 8 && page.contains("not finished"), "{page}");
    assert!(!page.contains("NaN") && !page.contains("inf"));
}

#[test]
fn what_cannot_be_reported() {
    let place = Place::new();
    assert!(place.run(&["report"]).misused().contains("<RUN|CHECKPOINT>"));
    place.run(&["report", "model"]).refused(2);
    place.finetune(&[]).done();
    place.write("scores.jsonl", "{\"evaluated\": \"x\"}\n");
    assert_snapshot!(place.run(&["report", "run", "--scores", "scores.jsonl"]).refused(3), @r"
    error: `scores.jsonl`, line 1: not a line of `kvtune evaluate --format json`: missing field `policy`

    hint: write the file with `kvtune evaluate … --format json >FILE`
    ");
    assert!(place.run(&["report", "run", "--out", "nowhere/page.html"]).refused(1).contains("`nowhere"));
}

/// A browser that is found on PATH.
fn browser() -> Option<PathBuf> {
    let places: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
    let names = ["chromium", "chromium-browser", "google-chrome"];
    names.iter().flat_map(|name| places.iter().map(move |place| place.join(name))).find(|path| path.is_file())
}

#[test]
fn a_browser_shows_the_page() {
    let Some(browser) = browser() else {
        println!("skipped: none of chromium, chromium-browser and google-chrome is on PATH");
        return;
    };
    let place = compared();
    let mut seen = Vec::new();
    for (scheme, is_dark) in [("light", false), ("dark", true)] {
        let shot = place.path(&format!("{scheme}.png"));
        let mut command = Command::new(&browser);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,2400"]);
        command.args(["--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"]);
        command.args(is_dark.then_some("--blink-settings=preferredColorScheme=0"));
        command.arg(format!("--user-data-dir={}", place.path("profile").display())).env("HOME", place.path("profile"));
        command.arg(format!("--screenshot={}", shot.display())).arg(format!("file://{}", place.path("page.html").display()));
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && shot.exists(), "{said}");
        // What the page does wrong, or is refused, stands in the console.
        assert!(!said.contains("CONSOLE"), "{said}");
        let (width, pixels) = pixels(&fs::read(shot).unwrap());
        let size = pixels.len() / (width * 2400);
        let mut colours: Vec<&[u8]> = pixels.chunks(size).collect();
        colours.sort_unstable();
        let of_back = colours.chunk_by(PartialEq::eq).map(<[_]>::len).max().unwrap();
        let different = colours.chunk_by(PartialEq::eq).count();
        assert!(width == 1200 && different > 100, "{different} colours");
        assert!(of_back < colours.len() * 97 / 100, "{of_back} of {} pixels have one colour", colours.len());
        let mean = pixels.iter().map(|&value| u64::from(value)).sum::<u64>() / pixels.len() as u64;
        seen.push(mean);
    }
    assert!(seen[0] > 200 && seen[1] < 100, "light and dark: {seen:?}");
}

/// Width and colours of a PNG as browsers write it: eight bits each, row after row.
fn pixels(file: &[u8]) -> (usize, Vec<u8>) {
    let number = |at: usize| u32::from_be_bytes(file[at..at + 4].try_into().unwrap()) as usize;
    assert_eq!((file[24], file[28]), (8, 0), "bits, and no order of rows but their own");
    let (width, size, mut at, mut packed) = (number(16), if file[25] == 6 { 4 } else { 3 }, 8, Vec::new());
    while at < file.len() {
        if &file[at + 4..at + 8] == b"IDAT" {
            packed.extend(&file[at + 8..at + 8 + number(at)]);
        }
        at += 12 + number(at);
    }
    let mut rows = Vec::new();
    flate2::read::ZlibDecoder::new(&packed[..]).read_to_end(&mut rows).unwrap();
    let (stride, mut pixels) = (width * size, Vec::<u8>::new());
    for (row, line) in rows.chunks(stride + 1).enumerate() {
        for (column, byte) in line[1..].iter().enumerate() {
            let known = |up: usize, left: usize| match (row.checked_sub(up), column.checked_sub(left * size)) {
                (Some(row), Some(column)) => pixels[row * stride + column],
                _ => 0,
            };
            let (left, up, corner) = (known(0, 1), known(1, 0), known(1, 1));
            let nearest = || {
                let guess = i16::from(left) + i16::from(up) - i16::from(corner);
                [left, up, corner].into_iter().min_by_key(|&value| (guess - i16::from(value)).abs()).unwrap()
            };
            let guess = match line[0] {
                0 => 0,
                1 => left,
                2 => up,
                3 => left.midpoint(up),
                _ => nearest(),
            };
            pixels.push(byte.wrapping_add(guess));
        }
    }
    (width, pixels)
}
