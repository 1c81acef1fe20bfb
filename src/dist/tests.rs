//! Ranks as threads of one process: what they exchange, and who is not let in. `tests/dist` has them as processes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};

use super::{Launched, ProcessGroup};
use crate::units::Exit;

const TIMEOUT: Duration = Duration::from_secs(20);

/// A port that nobody listens at.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub(super) fn launch(rank: usize, size: usize, port: u16) -> Launched {
    let address = "127.0.0.1".into();
    Launched { rank, size, local_rank: rank, address, port, run_id: "own".into(), is_served: false, by: "a test" }
}

fn as_ranks<T: Send>(size: usize, port: u16, work: impl Fn(&ProcessGroup) -> T + Sync) -> Vec<T> {
    as_ranks_within(TIMEOUT, size, port, |world| work(world))
}

/// The same with another time-out.
pub(crate) fn as_ranks_within<T: Send>(
    timeout: Duration,
    size: usize,
    port: u16,
    work: impl Fn(&mut ProcessGroup) -> T + Sync,
) -> Vec<T> {
    thread::scope(|scope| {
        let work = &work;
        let start = |rank| scope.spawn(move || work(&mut ProcessGroup::join(&launch(rank, size, port), timeout).unwrap()));
        let ranks: Vec<_> = (0..size).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn ranks_exchange_sums_and_bytes() {
    for size in [2, 3] {
        let seen = as_ranks(size, free_port(), |world| {
            let rank = world.rank();
            assert_eq!((world.size(), world.is_first()), (size, rank == 0));
            let bits = sums(world);
            let numbers = Tensor::from_slice(&[rank as f64, f64::NAN, 1e300]);
            world.sum(&numbers).unwrap();
            let numbers = Vec::<f64>::try_from(numbers).unwrap();
            assert_eq!((numbers[0], numbers[2]), ((0..size).sum::<usize>() as f64, 1e300 * size as f64));
            assert!(numbers[1].is_nan());
            let all = world.gather(&vec![rank as u8; rank * 3]).unwrap();
            assert_eq!(all, (0..size).map(|rank| vec![rank as u8; rank * 3]).collect::<Vec<_>>());
            assert_eq!(world.gather(&[]).unwrap(), vec![Vec::<u8>::new(); size]);
            let told = Tensor::from_slice(&[rank as i64; 3]);
            world.overwrite(&told, size - 1).unwrap();
            assert_eq!(Vec::<i64>::try_from(told).unwrap(), [size as i64 - 1; 3]);
            assert_eq!(world.of_first("telling", || Ok(vec![rank; 2])).unwrap(), [0; 2]);
            world.leave(None).unwrap();
            bits
        });
        assert!(seen.iter().all(|bits| *bits == seen[0]), "{seen:?}");
    }
}

/// Adds up numbers whose sum depends on the order; the bits of the sums.
fn sums(world: &ProcessGroup) -> Vec<Vec<f64>> {
    let (rank, size) = (world.rank(), world.size());
    let mut bits = Vec::new();
    for (kind, allowed) in [(Kind::Float, 1e-6), (Kind::Double, 1e-15)] {
        let of_rank = |rank: usize| (Tensor::arange(1000, (kind, Device::Cpu)) + rank as f64 * 0.1).sin();
        let own = of_rank(rank);
        world.sum(&own).unwrap();
        let whole = (0..size).map(of_rank).reduce(|a, b| a + b).unwrap();
        let error = (&own - whole).abs().max().double_value(&[]);
        assert!(error <= allowed, "{kind:?}: {error}");
        bits.push(Vec::try_from(own.to_kind(Kind::Double)).unwrap());
        // What does not lie in one piece, beside what must stay.
        let wide = Tensor::ones([4, 6], (kind, Device::Cpu)) * (rank + 1) as f64;
        world.sum(&wide.transpose(0, 1).narrow(0, 1, 3)).unwrap();
        let (there, beside) = (wide.double_value(&[2, 1]), wide.double_value(&[2, 0]));
        assert_eq!((there, beside), ((1..=size).sum::<usize>() as f64, (rank + 1) as f64));
    }
    bits
}

#[test]
fn one_rank_needs_nobody() {
    let world = ProcessGroup::alone();
    let tensor = Tensor::from_slice(&[1.5_f32]);
    world.sum(&tensor).unwrap();
    assert_eq!((world.rank(), world.size(), world.is_first(), tensor.double_value(&[0])), (0, 1, true, 1.5));
    assert_eq!(world.gather(b"x").unwrap(), [b"x".to_vec()]);
    assert_eq!(world.of_first("telling", || Ok(vec![1, 2])).unwrap(), [1, 2]);
    world.barrier().unwrap();
    world.leave(None).unwrap();
}

/// While they meet and while they work, others come to the store.
#[test]
fn strangers_are_refused_and_do_no_harm() {
    let port = free_port();
    let talk = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let _ = stream.write_all(bytes);
        let _ = stream.read(&mut [0; 64]);
        Some(stream)
    };
    // What c10d's clients begin with, and then a text, a list and a number of waits that are longer than any memory.
    let greeted = |query: u8| [&[0, 0xce, 0xf7, 0x85, 0x3c, query][..], &[0xff; 64]].concat();
    let mut garbage: Vec<Vec<u8>> = vec![b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0xff; 4096], vec![0; 64], Vec::new()];
    garbage.extend((0..=16).map(greeted));
    let (works, heard) = (AtomicBool::new(true), AtomicUsize::new(0));
    let come = |launch: &Launched| ProcessGroup::join(launch, TIMEOUT).err().map(|error| error.to_string());
    let refused = |world: &ProcessGroup| {
        world.barrier().unwrap();
        if !world.is_first() {
            let foreign = come(&Launched { run_id: "foreign".into(), ..launch(1, 2, port) }).unwrap();
            assert!(foreign.contains("run `foreign` of 2 ranks") && foreign.contains("to run `own` of 2 ranks"), "{foreign}");
            let one_more = come(&launch(2, 3, port)).unwrap();
            assert!(one_more.contains("of 3 ranks") && one_more.contains("`own` of 2 ranks"), "{one_more}");
            assert_eq!(come(&launch(1, 2, port)).unwrap(), format!("there is a rank 1 already in the run at 127.0.0.1:{port}"));
            assert_eq!(come(&launch(0, 2, port)).unwrap(), format!("rank 0 can't listen at 127.0.0.1:{port}"));
            // Where who started them serves the store, the second rank 0 finds the first one's place taken.
            let beside = Launched { is_served: true, ..launch(0, 2, port) };
            assert_eq!(come(&beside).unwrap(), format!("there is a rank 0 already in the run at 127.0.0.1:{port}"));
        }
        let until = Instant::now() + TIMEOUT;
        while heard.load(Ordering::Relaxed) < 2 * garbage.len() {
            assert!(Instant::now() < until, "no stranger was heard");
            thread::sleep(Duration::from_millis(5));
        }
        let seen = sums(world);
        world.leave(None).unwrap();
        seen
    };
    thread::scope(|scope| {
        // From before they meet until they have worked; connections stay open.
        scope.spawn(|| {
            let mut open = Vec::new();
            while works.load(Ordering::Relaxed) && open.len() < 1000 {
                for bytes in &garbage {
                    open.extend(talk(bytes));
                    heard.store(open.len(), Ordering::Relaxed);
                }
            }
        });
        let seen = as_ranks(2, port, refused);
        works.store(false, Ordering::Relaxed);
        assert_eq!(seen, as_ranks(2, free_port(), sums), "the same bits as among themselves");
    });
}

#[test]
fn the_store_listens_at_its_own_address_alone() {
    let port = free_port();
    as_ranks(2, port, |world| {
        // Another address of the same machine.
        assert!(!world.is_first() || TcpStream::connect(("127.0.0.2", port)).is_err());
        world.leave(None).unwrap();
    });
}

#[test]
fn a_rank_that_ends_with_an_error_ends_all() {
    for (message, expected) in [(Some("out of memory: 3 GiB"), "out of memory: 3 GiB"), (None, "it does not say why")] {
        let said = as_ranks(3, free_port(), |world| {
            if world.rank() == 1 {
                // Else it is dropped, as where a rank panics.
                return message.map(|message| world.leave(Some(message)).unwrap()).map(|()| String::new());
            }
            let error = world.sum(&Tensor::from_slice(&[1.0])).unwrap_err();
            assert!(error.payload::<super::peer::PeerGone>().is_some_and(|gone| gone.rank == 1), "{error}");
            assert_eq!(error.exit(), Exit::Failed);
            assert!(world.barrier().is_err(), "nothing is exchanged after an error");
            Some(error.to_string())
        });
        for error in [&said[0], &said[2]] {
            assert!(error.as_ref().is_some_and(|error| error.contains(expected)), "{said:?}");
        }
    }
}

#[test]
fn who_does_not_come_is_named() {
    let error = ProcessGroup::join(&launch(0, 3, free_port()), Duration::from_millis(200)).err().unwrap().to_string();
    assert!(error.contains("1 of 3 ranks") && error.ends_with("missing ranks 1, 2"), "{error}");
    let error = ProcessGroup::join(&launch(1, 3, free_port()), Duration::from_millis(200)).err().unwrap().to_string();
    assert!(error.contains("rank 1 does not reach the TCPStore") && error.contains("refused"), "{error}");
    // Who listens there and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = silent.local_addr().unwrap().port();
    let error = ProcessGroup::join(&launch(1, 3, at), Duration::from_millis(500)).err().unwrap().to_string();
    assert!(error.contains("rank 1 does not reach the TCPStore"), "{error}");
}

#[test]
fn a_slow_rank_is_waited_for() {
    let (port, timeout) = (free_port(), Duration::from_secs(2));
    thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || {
                let world = ProcessGroup::join(&launch(rank, 2, port), timeout).unwrap();
                // At work, or it would be taken for one that hangs.
                let until = Instant::now() + if rank == 1 { timeout + timeout / 4 } else { Duration::ZERO };
                while Instant::now() < until {}
                world.barrier().unwrap();
                world.leave(None).unwrap();
            });
        }
    });
}
