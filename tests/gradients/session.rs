//! A session that is extended as tokens come: hidden states and choices are those of the engine, for every policy.

use kvtune::engine::Session;
use tch::{Device, Kind, Tensor};

use super::FURTHER;
use crate::support::case::{Case, PLAIN, Width, registered_policies};
use crate::support::{batch, engine, model};

/// Hidden states of all tokens `(B, T, E)`, and every choice.
fn of_engine(case: &Case) -> (Tensor, String) {
    let (model, batch) = (model(case), batch(case));
    let mut hidden = Vec::new();
    let (_, log) = engine(case, &model).inspect(&model, &batch, &mut |_, of_column| hidden.push(of_column.copy())).unwrap();
    (Tensor::cat(&hidden, 1), log.hash())
}

/// The same of a session that is given so many tokens at a time.
fn of_session(case: &Case, pieces: &[usize]) -> (Tensor, String) {
    let (model, batch) = (model(case), batch(case));
    let engine = engine(case, &model);
    let ids: Vec<i64> = batch.sequences.iter().flat_map(|sequence| sequence.inputs.iter().map(|&id| i64::from(id))).collect();
    let ids_bt = Tensor::from_slice(&ids).view([batch.sequences.len() as i64, -1]).to_device(Device::Cpu);
    let mut session = Session::new(&engine, &model, batch.sequences.len(), batch.max_len()).unwrap();
    let mut hidden = Vec::new();
    for &piece in pieces {
        let (start, piece) = (session.num_tokens() as i64, piece as i64);
        hidden.push(session.extend(&engine, &model, &ids_bt.narrow(1, start, piece)).unwrap());
    }
    assert_eq!(session.num_tokens(), batch.max_len());
    (Tensor::cat(&hidden, 1), session.log().hash())
}

/// Policies that need the initial part of a prompt have none in a session.
fn has_initial_part(case: &Case) -> bool {
    !case.initial.is_empty()
}

#[test]
fn token_by_token_is_the_engine_with_chunks_of_one() {
    let mut compared = 0;
    for case in registered_policies().iter().chain(FURTHER).filter(|case| !has_initial_part(case)) {
        // One token a column, too: products of several tokens round otherwise.
        let case = Case { lengths: &[44, 44], chunk: 1, width: Width::Chunks(1), ..*case };
        let (expected, choices) = of_engine(&case);
        let (found, ours) = of_session(&case, &[1; 44]);
        assert_eq!(choices, ours, "{case:?}");
        assert!(found.equal(&expected), "{case:?}: {:.1e}", (found - expected).abs().max().double_value(&[]));
        compared += 1;
    }
    println!("{compared} cases");
}

#[test]
fn a_prompt_and_then_tokens_are_the_engine_with_singles_behind_the_prompt() {
    let slides = Case { window: 7, sliding_layers: &[0, 2], ..PLAIN };
    for case in
        [PLAIN, slides, Case { policy: "lastrec", ..PLAIN }, Case { policy: "snapkv", params: "window_size = 2", ..PLAIN }]
    {
        let case = Case { lengths: &[33, 33], ..case };
        let (expected, choices) = of_session(&case, &[18, 5, 5, 1, 1, 1, 1, 1]);
        let (found, ours) = of_session(&case, &[28, 1, 1, 1, 1, 1]);
        assert_eq!(choices, ours, "{case:?}");
        assert!((found - expected).abs().max().double_value(&[]) < 1e-12, "{case:?}");
    }
}

#[test]
fn a_session_ends_where_it_was_made_to() {
    let case = Case { lengths: &[8], kind: Kind::Float, ..PLAIN };
    let model = model(&case);
    let engine = engine(&case, &model);
    let ids = |n: i64| Tensor::ones([1, n], (Kind::Int64, Device::Cpu));
    let mut session = Session::new(&engine, &model, 1, 8).unwrap();
    let _ = session.extend(&engine, &model, &ids(8)).unwrap();
    let error = session.extend(&engine, &model, &ids(1)).unwrap_err();
    assert_eq!(error.to_string(), "a session of at most 8 tokens can not be extended to 9");
    for wrong in [ids(0), ids(1).expand([2, 1], false)] {
        let error = session.extend(&engine, &model, &wrong).unwrap_err();
        assert!(error.to_string().starts_with("a session of 1 sequences can not be extended by "), "{error}");
    }
}
