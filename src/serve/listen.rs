//! Connections: each is given a time in which its request must begin, and all are let finish when the server stops.

use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};

use super::served::RequestLimits;

/// Answers at a listener until `stops` says so and all replies are sent.
pub(super) fn listen(
    router: Router,
    limits: RequestLimits,
    listener: std::net::TcpListener,
    stops: impl Fn() -> bool + Send + Sync + 'static,
) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    runtime.block_on(async move {
        let mut listener = TcpListener::from_std(listener)?;
        let connections = GracefulShutdown::new();
        let mut stopped = std::pin::pin!(stopped(stops));
        loop {
            let (stream, _) = tokio::select! {
                accepted = Listener::accept(&mut listener) => accepted,
                () = &mut stopped => break,
            };
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(limits.headers);
            let serving = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router.clone()));
            // Who breaks off hears nothing, and nobody else does.
            tokio::spawn(connections.watch(serving));
        }
        // A client that neither sends nor reads does not hold the server up for longer than a request may take.
        let _ = timeout(limits.timeout, connections.shutdown()).await;
        Ok(())
    })
}

/// Comes when it is time to stop.
async fn stopped(stops: impl Fn() -> bool) {
    while !stops() {
        sleep(Duration::from_millis(50)).await;
    }
}
