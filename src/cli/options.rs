//! The options that all commands take.

use std::rc::Rc;

use clap::{Args, ValueEnum};
use tch::Device;

use super::device;
use super::world::{Joining, launched};
use crate::dist::ProcessGroup;
use crate::report::console;
use crate::units::Fault;

#[derive(Debug, Args)]
pub(super) struct SharedOptions {
    /// Where to compute: `auto`, `cpu`, `cuda` or `cuda:1`.
    #[arg(long, global = true, default_value_t = device::Wanted::Auto, value_name = "DEVICE", value_parser = device::Wanted::parse)]
    pub(super) device: device::Wanted,
    /// CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number.
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) threads: Option<u16>,
    /// How to print results: words and tables, or a JSON object per line.
    #[arg(long, global = true, value_enum, default_value_t = Format::Text)]
    pub(super) format: Format,
    /// Print only results, warnings and errors.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(super) quiet: bool,
    /// Print more: every training step, and notes each time.
    #[arg(short, long, global = true)]
    pub(super) verbose: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    #[value(alias = "table")]
    Text,
    Json,
}

impl SharedOptions {
    /// The words that give another process the same options.
    pub(super) fn words(&self) -> Vec<String> {
        let device = (self.device != device::Wanted::Auto).then(|| self.device.to_string());
        let values = [("--device", device), ("--threads", self.threads.map(|count| count.to_string()))];
        let values = values.into_iter().filter_map(|(name, value)| Some(format!("{name}={}", value?)));
        let flags = [("--format=json", self.format == Format::Json), ("--quiet", self.quiet), ("--verbose", self.verbose)];
        values.chain(flags.iter().filter(|(_, is_given)| *is_given).map(|(flag, _)| (*flag).to_owned())).collect()
    }

    /// The device to compute on, made ready.
    pub(super) fn device(&self) -> Result<Device, Fault> {
        let local_rank = launched()?.map_or(0, |launch| launch.local_rank);
        device::prepare(self.device, self.threads, local_rank)
    }

    /// Does `work` with all ranks, on this one's device, and tells the others how it has ended.
    pub(super) fn with_ranks<T>(
        &self,
        joining: Joining,
        work: impl FnOnce(Device, &Rc<ProcessGroup>) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        // Before ranks meet: they do so by libtorch, which would remember that there is no CUDA.
        let device = self.device()?;
        let mut world = match launched()? {
            Some(launch) => ProcessGroup::join(&launch, joining.dist_timeout)?,
            None => ProcessGroup::alone(),
        };
        if !world.is_first() {
            console::be_quiet();
        }
        let chosen = world.choose_backend(joining.backend, device);
        let world = Rc::new(world);
        let done = chosen.and_then(|note| {
            if let Some(note) = note {
                console::note(&note);
            }
            work(device, &world)
        });
        world.leave(done.as_ref().err().map(ToString::to_string).as_deref())?;
        done
    }
}
