//! Requests to the server that are too large, too deep or none: each is answered or cut off, and the server lives on.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::ground::Ground;
use crate::serve::{Server, received};

/// A request as it goes over the line; the server may cut it off at any point.
fn raw(server: &Server, bytes: &[u8]) -> (u16, String) {
    let mut stream = server.connect();
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    received(stream)
}

#[test]
fn requests() {
    let server = Server::start(&["--timeout", "5", "--header-timeout", "5"]);
    let alive = |what: &str| assert_eq!(server.ask("GET /health", &Value::Null).0, 200, "after {what}");
    alive("the beginning");
    let before = server.resident();
    let completions = |body: &str| received(server.send("POST /v1/completions", body.as_bytes()));
    let deep = format!("{{\"prompt\": {}{}}}", "[".repeat(200_000), "]".repeat(200_000));
    let many =
        format!("{{\"prompt\": \"a\", {}\"n\": 1}}", (0..100_000).map(|n| format!("\"k{n}\": 1, ")).collect::<Vec<_>>().concat());
    for (what, body) in [
        ("deep brackets", deep),
        ("100 000 fields", many),
        ("a number of 300 digits", format!("{{\"prompt\": \"a\", \"n\": {}}}", "9".repeat(300))),
        ("a negative number", "{\"prompt\": \"a\", \"max_tokens\": -1}".into()),
        ("2^63 tokens", "{\"prompt\": \"a\", \"max_tokens\": 9223372036854775808}".into()),
        ("NaN", "{\"prompt\": \"a\", \"temperature\": NaN}".into()),
        ("1e400", "{\"prompt\": \"a\", \"temperature\": 1e400}".into()),
        ("ids outside the vocabulary", "{\"prompt\": [[4294967295]]}".into()),
        ("nothing", String::new()),
        ("no UTF-8", "\u{fffd}".into()),
        // What the model writes is nobody's fault, so it is the same each time.
        ("100 000 stops", json!({ "prompt": "a", "temperature": 0, "stop": vec!["x"; 100_000] }).to_string()),
        ("a field with escapes", "{\"prompt\": \"a\", \"\\u001b[31m\": 1}".into()),
    ] {
        let began = Instant::now();
        let (status, text) = completions(&body);
        assert!((200..500).contains(&status) && text.len() < 16384, "{what}: {status} {} bytes", text.len());
        assert!(!text.chars().any(char::is_control), "{what}: {text:?}");
        assert!(began.elapsed() < Duration::from_secs(10), "{what}: {:?}", began.elapsed());
        alive(what);
    }
    let long = "x".repeat(1 << 20);
    for (what, request) in [
        ("a line of 1 MB", format!("GET /{long} HTTP/1.1\r\n\r\n")),
        ("a header of 1 MB", format!("GET /health HTTP/1.1\r\nX: {long}\r\n\r\n")),
        ("10 000 headers", format!("GET /health HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(10_000))),
        ("a negative length", "POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n".into()),
        ("two lengths", "POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}".into()),
        (
            "a chunk of 2^64 bytes",
            "POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{".into(),
        ),
        ("no HTTP", "\u{0}\u{1}\u{2}".repeat(100)),
        ("TLS", "\u{16}\u{3}\u{1}\u{2}".into()),
        ("a path upwards", "GET /../../../etc/passwd HTTP/1.1\r\nConnection: close\r\n\r\n".into()),
    ] {
        let (status, text) = raw(&server, request.as_bytes());
        assert!(status == 0 || (400..500).contains(&status), "{what}: {status} {text:.200}");
        alive(what);
    }
    assert!(server.resident() < before + (256 << 10), "{} kB, before {before} kB", server.resident());
    assert_eq!(server.end(), Some(0));
}

/// A body that says it has a gigabyte, and one that says nothing and does not end: neither is kept.
#[test]
fn bodies_of_a_gigabyte() {
    let server = Server::start(&["--timeout", "5"]);
    let before = server.resident();
    for head in ["Content-Length: 1073741824", "Transfer-Encoding: chunked"] {
        let mut stream = server.connect();
        write!(stream, "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n{head}\r\n\r\n").unwrap();
        let piece = [&b"10000\r\n"[..], &vec![b' '; 1 << 16], b"\r\n"].concat();
        let sent = (0..1 << 14).take_while(|_| stream.write_all(&piece).is_ok()).count();
        assert!(sent < 1 << 14, "a gigabyte was taken");
        let _ = stream.read_to_end(&mut Vec::new());
        assert_eq!(server.ask("GET /health", &Value::Null).0, 200);
    }
    assert!(server.resident() < before + (256 << 10), "{} kB, before {before} kB", server.resident());
    assert_eq!(server.end(), Some(0));
}

/// A text that a tokenizer or a template turns into terabytes: the request is refused, and not the server ended.
#[test]
fn texts_that_explode() {
    let ground = Ground::new();
    // Nothing happens before somebody says `b`.
    let doubled = "{\"type\": \"Replace\", \"pattern\": {\"String\": \"b\"}, \"content\": \"bbbbbbbbbbbbbbbb\"}";
    let normalizers = format!("{{\"type\": \"Sequence\", \"normalizers\": [{}]}}", [doubled; 12].join(","));
    ground.set_json("model/tokenizer.json", "normalizer", &normalizers);
    let server = Server::of(&ground.path("model"), &[]);
    assert_eq!(server.ask("POST /tokenize", &json!({ "prompt": "a" })).0, 200);
    let (status, text) = server.ask("POST /v1/completions", &json!({ "prompt": "ab" }));
    assert!(status == 400 && text.contains("too much memory"), "{status} {text}");
    assert_eq!(server.ask("POST /v1/completions", &json!({ "prompt": "a", "max_tokens": 1 })).0, 200);
    assert_eq!(server.end(), Some(0));
}

/// Prompts that are far too long: their tokens would take two hundred times as much memory.
#[test]
fn prompts_that_are_far_too_long() {
    let server = Server::start(&[]);
    let before = server.resident();
    let long = json!({ "prompt": "a".repeat(30_000_000) }).to_string();
    std::thread::scope(|scope| {
        for path in ["/v1/completions", "/tokenize", "/generate"] {
            let (server, long) = (&server, &long);
            scope.spawn(move || {
                let (status, text) = received(server.send(&format!("POST {path}"), long.as_bytes()));
                let is_refused = text.contains("a prompt has 30000000 bytes; this server takes");
                assert!(status == 400 && is_refused && text.contains("context_length_exceeded"), "{path}: {status} {text}");
            });
        }
    });
    assert!(server.memory("VmHWM") < before + (384 << 10), "{} kB, before {before} kB", server.memory("VmHWM"));
    assert!(server.resident() < before + (64 << 10), "{} kB, before {before} kB", server.resident());
    assert_eq!(server.end(), Some(0));
}
