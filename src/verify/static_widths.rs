//! Sessions at fixed widths beside those that compute no pads: the same choices and hidden states, and a device with graphs launches them.

use tch::{Device, Kind, Tensor};

use super::mutations::support;
use crate::cache::ReplayLog;
use crate::engine::{Session, SessionSpec, decode_step};
use crate::model::while_graphs_are_simulated;
use crate::recipe::BufferKind;
use support::case::{Case, PLAIN, Tail};

const PROMPT: i64 = 29;
const TOKENS: usize = 36;

/// Hidden states of a prompt, column by column, and of the tokens behind it, which three sessions get side by side; and their choices.
fn hidden_and_choices(case: &Case) -> (Tensor, Vec<ReplayLog>) {
    let model = support::model(case);
    let engine = support::engine(case, &model);
    let mut layers = engine.settings().session_layers(4, Device::Cpu).unwrap();
    let ids: Vec<i64> = (0..TOKENS as i64).map(|i| i * i * 5 % 23 + 2).collect();
    let ids_1t = Tensor::from_slice(&ids).unsqueeze(0);
    let spec = SessionSpec { prompt: Some(PROMPT as usize), ..SessionSpec::new(1, TOKENS) };
    let (mut session, mut hidden) = (Session::new(&engine, &model, &spec).unwrap(), Vec::new());
    while (session.num_tokens() as i64) < PROMPT {
        let rest = ids_1t.narrow(1, session.num_tokens() as i64, PROMPT - session.num_tokens() as i64);
        let sink = &mut |_: usize, column: &Tensor| hidden.push(column.copy());
        session.extend_by_column(&engine, &model, &mut layers, &rest, Some(sink)).unwrap();
    }
    let mut sessions = [session.fork().unwrap(), session.fork().unwrap(), session];
    for &id in &ids[PROMPT as usize..] {
        let mut all: Vec<&mut Session> = sessions.iter_mut().collect();
        let next = [id as u32, 3, 4];
        let rows = decode_step(&engine, &model, &mut layers, &mut all, &next, 4).unwrap().narrow(0, 0, 3);
        hidden.extend((0..3).map(|row| rows.narrow(0, row, 1)));
    }
    (Tensor::cat(&hidden, 1), sessions.iter().map(Session::log).collect())
}

#[test]
fn sessions_at_fixed_widths_come_to_the_same_and_launch_graphs() {
    let plain = Case { kind: Kind::Double, has_cuda_graphs: true, ..PLAIN };
    for case in [
        plain,
        Case { policy: "lastrec", chunk: 4, ..plain },
        Case { policy: "dense", cache: &[50], ..plain },
        Case { buffer: BufferKind::Int8, is_offloaded: true, ..plain },
        Case { window: 7, sliding_layers: &[0, 2], ..plain },
        Case { tail: Tail::InBlocks(3), ..plain },
    ] {
        let (expected, choices) = hidden_and_choices(&case);
        let ((found, ours), replays) = while_graphs_are_simulated(|| hidden_and_choices(&Case { is_static: true, ..case }));
        let apart = (found - expected).abs().max().double_value(&[]);
        assert!(apart < 1e-12, "{case:?}: {apart:.1e}");
        assert!(replays > 0, "{case:?}");
        for (ours, choices) in ours.iter().zip(&choices) {
            for (ours, choices) in ours.layers.iter().zip(&choices.layers) {
                assert_eq!(format!("{ours:?}"), format!("{choices:?}"), "{case:?}");
            }
        }
    }
}
