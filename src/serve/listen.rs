//! Connections: each is given a time in which its request must begin, and all are let finish when the server stops.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use super::access::ConnectionEnds;
use super::options::ServeOptions;

/// How long a reply that is ready may take to be sent to a client that has closed its end.
const GRACE: Duration = Duration::from_millis(500);

/// Answers at a listener until `stops` says so and all replies are sent.
pub(super) fn listen(
    router: Router,
    options: &ServeOptions,
    listener: std::net::TcpListener,
    stops: impl Fn() -> bool + Send + Sync + 'static,
) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    runtime.block_on(async move {
        let mut listener = TcpListener::from_std(listener)?;
        let connections = GracefulShutdown::new();
        let mut stopped = std::pin::pin!(stopped(stops));
        loop {
            let (stream, peer) = tokio::select! {
                accepted = Listener::accept(&mut listener) => accepted,
                () = &mut stopped => break,
            };
            let mut http = http1::Builder::new();
            // Who closes its own side after asking gets a reply that is ready within `GRACE`; then it can not be told from one that is gone.
            http.timer(TokioTimer::new()).header_read_timeout(options.header_timeout).half_close(true);
            // Without another file for it the connection can not be served.
            let Ok(second) = second(&stream) else { continue };
            let (gone, ends) = (gone(second), ConnectionEnds { peer, local: stream.local_addr().ok() });
            let inner = TowerToHyperService::new(router.clone());
            let service = service_fn(move |mut request: hyper::Request<Incoming>| {
                request.extensions_mut().insert(ends);
                inner.call(request)
            });
            let serving = connections.watch(http.serve_connection(TokioIo::new(stream), service));
            tokio::spawn(async move {
                tokio::select! {
                    // Who breaks off hears nothing, and nobody else does.
                    _ = serving => {}
                    () = gone => {}
                }
            });
        }
        // A client that neither sends nor reads does not hold the server up for longer than a request may take.
        let _ = timeout(options.timeout, connections.shutdown()).await;
        Ok(())
    })
}

fn second(stream: &TcpStream) -> std::io::Result<TcpStream> {
    TcpStream::from_std(std::net::TcpStream::from(stream.as_fd().try_clone_to_owned()?))
}

/// Comes when the client has closed its end. Who serves the connection does not see that behind bytes which it has not read: a further
/// request, say.
async fn gone(stream: TcpStream) {
    while let Ok(ready) = stream.ready(Interest::READABLE).await {
        if ready.is_read_closed() {
            break;
        }
        // What has come is not read here: what comes next is waited for.
        let _ = stream.try_io(Interest::READABLE, || Err::<(), _>(ErrorKind::WouldBlock.into()));
    }
    sleep(GRACE).await;
}

async fn stopped(stops: impl Fn() -> bool) {
    while !stops() {
        sleep(Duration::from_millis(50)).await;
    }
}
