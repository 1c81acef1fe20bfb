//! What a cache refuses.

use kvtune::recipe::{BufferKind, Storage};

use super::content::Content;
use super::scene::Scene;
use super::simulated::Played;

#[test]
fn writing_and_unwinding_out_of_order_is_refused() {
    let scene = Scene {
        policy: "lastrec",
        params: String::new(),
        buffer: BufferKind::Plain,
        is_offloaded: false,
        storage: Storage::Preallocated,
        groups: 2,
        lengths: vec![30],
        capacity: 18,
        chunk: 5,
        levels: 9,
        first: 18,
        initial_parts: Vec::new(),
    };
    let content = Content::new(&scene);
    let mut simulated = Played::forward(&scene, &content);
    let first = simulated.spans[0].clone();
    let tokens = content.chunk(first.start, &first.real, first.len);
    let refusal = simulated.cache.write(&first, None, &tokens).unwrap_err().to_string();
    assert!(refusal.contains("layer 0: write chunk 0, but the cache stands after 7 chunks"), "{refusal}");
    let refusal = simulated.cache.unwind(&first, &simulated.undo[0]).unwrap_err().to_string();
    assert!(refusal.contains("layer 0: unwind chunk 0"), "{refusal}");
}
