//! The tables of `docs/reference/recipe.md` say what the program reads. `WRITE_REFERENCE=1 cargo test --test suite recipes::reference`
//! writes them anew; the text around them stays.

use std::path::Path;

use kvtune::recipe::reference;

#[test]
fn the_reference_has_every_key_as_the_program_reads_it() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/recipe.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let mut tables = reference().into_iter();
    let is_table = |block: &str| block.starts_with("| key |");
    let count = page.split("\n\n").filter(|block| is_table(block)).count();
    assert_eq!(count, tables.len(), "the page needs a line `| key |` for each table, below its heading");
    let block = |block: &str| if is_table(block) { tables.next().unwrap() } else { block.to_owned() }.trim_end().to_owned();
    let blocks = page.split("\n\n").map(block);
    let expected = format!("{}\n", blocks.collect::<Vec<_>>().join("\n\n"));
    if std::env::var_os("WRITE_REFERENCE").is_some() {
        std::fs::write(&path, &expected).unwrap();
        return;
    }
    let differs = expected.lines().zip(page.lines()).find(|(expected, found)| expected != found);
    assert!(
        page == expected,
        "{differs:?}: `WRITE_REFERENCE=1 cargo test --test suite recipes::reference` writes docs/reference/recipe.md anew"
    );
}
