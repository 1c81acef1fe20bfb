//! A session that is extended as tokens come: hidden states and choices are those of the engine, for every policy.

use kvtune::cache::{LayerLog, ReplayLog, Victims};
use kvtune::engine::{Engine, Session, SessionSpec, decode_step};
use kvtune::model::{CapturedLayers, Model};
use kvtune::recipe::{BufferKind, Storage};
use tch::{Device, Kind, Tensor};

use crate::support::case::{Case, HeadKind, PLAIN, Tail, TargetsAt, Width};
use crate::support::grid::{ACROSS_LAYERS, each_policy};
use crate::support::{batch, engine, model};

/// Hidden states of all tokens `(B, T, E)`, and every choice.
fn of_engine(case: &Case) -> (Tensor, String) {
    let (model, batch) = (model(case), batch(case));
    let mut hidden = Vec::new();
    let (_, log) = engine(case, &model).inspect(&model, &batch, None, &mut |_, of_column| hidden.push(of_column.copy())).unwrap();
    (Tensor::cat(&hidden, 1), log.hash())
}

/// The tokens of a case's batch, whose sequences are of one length: `(B, T)`.
fn ids_of(case: &Case) -> Tensor {
    let batch = batch(case);
    let ids: Vec<i64> = batch.sequences.iter().flat_map(|sequence| sequence.inputs.iter().map(|&id| i64::from(id))).collect();
    Tensor::from_slice(&ids).view([batch.sequences.len() as i64, -1]).to_device(Device::Cpu)
}

/// What a session of a case is made for.
fn spec_of(case: &Case) -> SessionSpec {
    let initial = batch(case).sequences.iter().filter_map(|sequence| sequence.initial).collect();
    SessionSpec { initial, ..SessionSpec::new(case.lengths.len(), case.lengths[0]) }
}

/// Hidden states `(B, n, E)` of the next tokens of a session.
fn extend(session: &mut Session, (engine, model): (&Engine, &Model), ids_bn: &Tensor) -> Tensor {
    let mut hidden = Vec::new();
    session.extend(engine, model, ids_bn, Some(&mut |_, of_column| hidden.push(of_column.copy()))).unwrap();
    Tensor::cat(&hidden, 1)
}

/// The same as [`of_engine`] of a session that is given so many tokens at a time.
fn of_session(case: &Case, spec: &SessionSpec, pieces: &[usize]) -> (Tensor, String) {
    let (model, ids_bt) = (model(case), ids_of(case));
    let engine = engine(case, &model);
    let mut session = Session::new(&engine, &model, spec).unwrap();
    let mut hidden = Vec::new();
    for &piece in pieces {
        let start = session.num_tokens() as i64;
        hidden.push(extend(&mut session, (&engine, &model), &ids_bt.narrow(1, start, piece as i64)));
    }
    assert_eq!(session.num_tokens() as i64, ids_bt.size()[1]);
    (Tensor::cat(&hidden, 1), session.log().hash())
}

/// Every policy and every way to store entries, for sequences of one length.
fn every_session(lengths: &'static [usize]) -> Vec<Case> {
    let further = [
        ACROSS_LAYERS,
        Case { name: "paged", policy: "dense", cache: &[16], chunk: 3, storage: Storage::Paged, ..PLAIN },
        Case { name: "windows", window: 7, sliding_layers: &[0, 2], ..PLAIN },
    ];
    let cases = [each_policy(), further.to_vec()].concat();
    let initial = |case: &Case| if case.initial.is_empty() { case.initial } else { &[(2, 6), (3, 5)] };
    let of_tokens =
        |case: Case| Case { lengths, initial: initial(&case), head: HeadKind::NextToken, targets: TargetsAt::All, ..case };
    cases.into_iter().map(of_tokens).collect()
}

#[test]
fn token_by_token_is_the_engine_with_chunks_of_one() {
    for case in every_session(&[31, 31]) {
        // One token a column, too: products of several tokens round otherwise.
        let case = Case { chunk: 1, width: Width::Chunks(1), ..case };
        let (expected, choices) = of_engine(&case);
        let (found, ours) = of_session(&case, &spec_of(&case), &[1; 31]);
        assert_eq!(choices, ours, "{case:?}");
        assert!(found.equal(&expected), "{case:?}: {:.1e}", (found - expected).abs().max().double_value(&[]));
    }
}

#[test]
fn a_prompt_and_then_tokens_are_what_single_tokens_for_targets_trains() {
    for case in every_session(&[33, 33]) {
        let case = Case { tail: Tail::OneByOne, targets: TargetsAt::Last(6), ..case };
        let (expected, choices) = of_engine(&case);
        let spec = SessionSpec { prompt: Some(27), ..spec_of(&case) };
        let (found, ours) = of_session(&case, &spec, &[27, 1, 1, 1, 1, 1, 1]);
        assert_eq!(choices, ours, "{case:?}");
        assert!((found - expected).abs().max().double_value(&[]) < 1e-12, "{case:?}");
    }
}

/// What each chunk evicted that evicted any, layer by layer.
fn victims(log: &ReplayLog) -> Vec<Vec<Vec<i64>>> {
    let of_chunk = |victims: &Victims| (0..2).flat_map(|head| victims.of_head(0, head).unwrap()).collect();
    let of_layer = |layer: &LayerLog| (0..log.spans.len()).filter_map(|c| layer.victims(c).map(of_chunk)).collect();
    log.layers.iter().map(of_layer).collect()
}

#[test]
fn a_prompt_and_then_tokens_in_blocks_are_what_is_trained() {
    for case in every_session(&[34]) {
        let case = Case { tail: Tail::InBlocks(4), targets: TargetsAt::Last(7), ..case };
        let (model, ids_bt) = (model(&case), ids_of(&case));
        let engine = engine(&case, &model);
        let mut expected = Vec::new();
        let (_, log) = engine.inspect(&model, &batch(&case), None, &mut |_, of_column| expected.push(of_column.copy())).unwrap();
        // The last block has a pad.
        let expected = Tensor::cat(&expected, 1).narrow(1, 0, 34);
        let on = (&engine, &model);
        let mut session = Session::new(&engine, &model, &SessionSpec { prompt: Some(27), ..spec_of(&case) }).unwrap();
        let mut hidden = vec![extend(&mut session, on, &ids_bt.narrow(1, 0, 27))];
        let next = |session: &mut Session| {
            let id = ids_bt.int64_value(&[0, session.num_tokens() as i64]) as u32;
            decode_step(&engine, &model, &mut CapturedLayers::default(), &mut [session], &[id], 1).unwrap()
        };
        hidden.extend([next(&mut session), next(&mut session)]);
        // Within a block a copy goes on, and so does who reads further tokens at once.
        let mut copy = session.fork().unwrap();
        hidden.extend([next(&mut session), next(&mut session)]);
        // Where nothing leaves there are no blocks, and what is read at once is a chunk.
        let further = if engine.settings().decode_block() == 1 { 1 } else { 2 };
        let at_once: Vec<Tensor> =
            (29..31).step_by(further as usize).map(|at| extend(&mut copy, on, &ids_bt.narrow(1, at, further))).collect();
        for session in [&mut session, &mut copy] {
            hidden.truncate(5);
            hidden.extend([next(session), next(session), next(session)]);
            assert_eq!(session.num_tokens(), 34);
            let apart = (Tensor::cat(&hidden, 1) - &expected).abs().max().double_value(&[]);
            assert!(apart < 1e-12, "{case:?}: {apart:.1e}");
            assert_eq!(victims(&session.log()), victims(&log), "{case:?}");
        }
        assert!((Tensor::cat(&at_once, 1) - expected.narrow(1, 29, 2)).abs().max().double_value(&[]) < 1e-12, "{case:?}");
    }
}

#[test]
fn a_copy_and_a_saved_session_go_on_to_the_bit() {
    for case in every_session(&[33, 33]) {
        let (model, ids_bt) = (model(&case), ids_of(&case));
        let engine = engine(&case, &model);
        let on = (&engine, &model);
        let mut session = Session::new(&engine, &model, &spec_of(&case)).unwrap();
        let _ = extend(&mut session, on, &ids_bt.narrow(1, 0, 25));
        let mut fork = session.fork().unwrap();
        let snapshot = session.snapshot().unwrap();
        let mut restored = Session::restored(&engine, &model, &spec_of(&case), snapshot).unwrap();
        // Another continuation in between leaves no trace in the copies.
        let _ = extend(&mut session, on, &ids_bt.narrow(1, 3, 8));
        let rest = ids_bt.narrow(1, 25, 8);
        let mut whole = Session::new(&engine, &model, &spec_of(&case)).unwrap();
        let _ = extend(&mut whole, on, &ids_bt.narrow(1, 0, 25));
        let expected = extend(&mut whole, on, &rest);
        for copy in [&mut fork, &mut restored] {
            assert!(extend(copy, on, &rest).equal(&expected), "{case:?}");
            assert_eq!(copy.num_tokens(), 33);
        }
        assert_eq!(fork.log().hash(), whole.log().hash(), "{case:?}");
    }
}

#[test]
fn a_session_that_goes_back_is_one_that_has_read_no_more() {
    let dense = |case: &Case| Case { policy: "dense", cache: &[40], chunk: 5, lengths: &[33], width: Width::Chunks(1), ..*case };
    let kinds = [
        dense(&PLAIN),
        Case { storage: Storage::Growing, ..dense(&PLAIN) },
        Case { storage: Storage::Paged, ..dense(&PLAIN) },
        Case { buffer: BufferKind::Int8, is_offloaded: true, ..dense(&PLAIN) },
        Case { window: 30, sliding_layers: &[0, 2], ..dense(&PLAIN) },
    ];
    for case in kinds {
        let (model, ids_bt) = (model(&case), ids_of(&case));
        let engine = engine(&case, &model);
        let on = (&engine, &model);
        let spec = SessionSpec { keeps_log: false, ..spec_of(&case) };
        // To the border of a chunk of what was read, and to one between tokens that came one by one.
        for (read, back) in [(28, 20), (28, 30)] {
            let (mut session, mut expected) =
                (Session::new(&engine, &model, &spec).unwrap(), Session::new(&engine, &model, &spec).unwrap());
            let _ = extend(&mut session, on, &ids_bt.narrow(1, 0, read));
            for at in read..32 {
                // Other tokens than those that follow below.
                let other = if at < back { at } else { 0 };
                let _ = extend(&mut session, on, &ids_bt.narrow(1, other, 1));
            }
            assert!(session.crop(back as usize), "{case:?}");
            let _ = extend(&mut expected, on, &ids_bt.narrow(1, 0, read.min(back)));
            for at in read..back {
                let _ = extend(&mut expected, on, &ids_bt.narrow(1, at, 1));
            }
            let rest = ids_bt.narrow(1, back, 33 - back);
            assert!(extend(&mut session, on, &rest).equal(&extend(&mut expected, on, &rest)), "{case:?}, {back}");
        }
    }
    for case in [PLAIN, Case { window: 7, sliding_layers: &[0], ..dense(&PLAIN) }] {
        let case = Case { lengths: &[33], ..case };
        let (model, ids_bt) = (model(&case), ids_of(&case));
        let engine = engine(&case, &model);
        let mut session = Session::new(&engine, &model, &SessionSpec { keeps_log: false, ..spec_of(&case) }).unwrap();
        let _ = extend(&mut session, (&engine, &model), &ids_bt);
        assert!(!session.crop(20), "entries have left: {case:?}");
    }
}

#[test]
fn sessions_side_by_side_are_those_sessions_alone() {
    for case in every_session(&[33]) {
        let (model, ids_bt) = (model(&case), ids_of(&case));
        let engine = engine(&case, &model);
        let spec = SessionSpec { keeps_log: false, ..spec_of(&case) };
        let begun = |tokens: i64| {
            let mut session = Session::new(&engine, &model, &spec).unwrap();
            let _ = extend(&mut session, (&engine, &model), &ids_bt.narrow(1, 0, tokens));
            session
        };
        let next = |tokens: usize| ids_bt.int64_value(&[0, tokens as i64]) as u32;
        let prompts = [5, 28, 19];
        let alone: Vec<Vec<Tensor>> = prompts
            .iter()
            .map(|&prompt| {
                let mut session = begun(prompt);
                let mut step = |tokens| {
                    decode_step(&engine, &model, &mut CapturedLayers::default(), &mut [&mut session], &[next(tokens)], 4).unwrap()
                };
                (prompt as usize..prompt as usize + 5).map(&mut step).collect()
            })
            .collect();
        let mut sessions = prompts.map(begun);
        for step in 0..5 {
            let ids: Vec<u32> = sessions.iter().map(|session| next(session.num_tokens())).collect();
            let mut together: Vec<&mut Session> = sessions.iter_mut().collect();
            let hidden = decode_step(&engine, &model, &mut CapturedLayers::default(), &mut together, &ids, 4).unwrap();
            for (i, alone) in alone.iter().enumerate() {
                assert!(hidden.narrow(0, i as i64, 1).equal(&alone[step].narrow(0, 0, 1)), "{case:?}, session {i}, step {step}");
            }
        }
    }
}

#[test]
fn a_session_ends_where_it_was_made_to() {
    let case = Case { lengths: &[8], kind: Kind::Float, ..PLAIN };
    let model = model(&case);
    let engine = engine(&case, &model);
    let ids = |n: i64| Tensor::ones([1, n], (Kind::Int64, Device::Cpu));
    let mut session = Session::new(&engine, &model, &SessionSpec::new(1, 8)).unwrap();
    assert!(session.snapshot().is_none(), "there is nothing to keep");
    session.extend(&engine, &model, &ids(8), None).unwrap();
    let error = session.extend(&engine, &model, &ids(1), None).unwrap_err();
    assert_eq!(error.to_string(), "a session of at most 8 tokens can not be extended to 9");
    for wrong in [ids(0), ids(1).expand([2, 1], false)] {
        let error = session.extend(&engine, &model, &wrong, None).unwrap_err();
        assert!(error.to_string().starts_with("a session of 1 sequences can not be extended by "), "{error}");
    }
    let other = Case { buffer: BufferKind::Int8, ..case };
    let other = crate::support::engine(&other, &model);
    let error = Session::restored(&other, &model, &SessionSpec::new(1, 20), session.snapshot().unwrap()).err().unwrap();
    assert!(error.to_string().starts_with("layer 0: `keys.0` of a saved cache does not fit: expected [1, 2, 8, "), "{error}");
}

/// Budgets by head move slots from one head to another, and add none.
#[test]
fn heads_with_budgets_hold_on_average_what_one_length_gives() {
    let params = "floor = 0.4\npolicy = \"knorm\"";
    let of = |policy| if policy == "adakv" { Case { policy, params, ..PLAIN } } else { Case { policy, params: "", ..PLAIN } };
    let entries = ["adakv", "knorm"].map(|policy| {
        let case = Case { lengths: &[45], cache: &[25], ..of(policy) };
        let (model, ids_bt) = (model(&case), ids_of(&case));
        let engine = engine(&case, &model);
        let mut session = Session::new(&engine, &model, &spec_of(&case)).unwrap();
        let _ = extend(&mut session, (&engine, &model), &ids_bt);
        session.entries()
    });
    assert_eq!(entries[0], entries[1]);
    assert!(entries[0].1 > 0);
}
