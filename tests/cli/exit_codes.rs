//! The exit codes are an interface: their numbers, and the errors of other programs' types that become faults.

use std::io;
use std::path::Path;

use kvtune::files::io_fault;
use kvtune::native::BackwardError;
use kvtune::native::cuda::GraphError;
use kvtune::recipe::Recipe;
use kvtune::units::{Exit, Fault, FaultKind};

#[test]
fn the_codes_are_those_that_scripts_know() {
    let codes = [Exit::Failed, Exit::Usage, Exit::Data, Exit::Memory, Exit::NotFinite].map(|exit| exit as u8);
    assert_eq!(codes, [1, 2, 3, 4, 5]);
}

#[test]
fn what_becomes_a_fault_has_its_code() {
    let io = |action| io_fault(action, Path::new("x"))(io::ErrorKind::NotFound.into());
    let all = [
        (Exit::Data, io("read")),
        (Exit::Failed, io("write")),
        (Exit::Usage, Recipe::parse("x".into(), Path::new("x"), &[]).unwrap_err()),
        (Exit::Failed, BackwardError("x".into()).into()),
        (Exit::Failed, GraphError::Failed("x".into()).into()),
        (Exit::Usage, GraphError::Lacking("x".into()).into()),
        (Exit::Failed, Fault::interrupted()),
        (Exit::Failed, Fault::defect("x")),
    ];
    for (code, error) in all {
        assert_eq!(error.exit(), code, "{error:?}");
    }
    let lacking = Fault::from(GraphError::Lacking("this libtorch has no `x`".into()));
    assert_eq!(lacking.kind(), FaultKind::NoGraphs);
    assert_eq!(lacking.to_string(), "no CUDA graph can be captured: this libtorch has no `x`");
    assert!(lacking.hint().is_some_and(|hint| hint.starts_with("set `grad.cuda_graphs = false`")));
}
