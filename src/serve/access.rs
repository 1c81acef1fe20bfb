//! Who may ask: a page of another origin in somebody's browser may not, unless it is allowed, nor may a name that only leads here.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::ApiError;
use super::options::ServeOptions;

#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionEnds {
    pub(super) peer: SocketAddr,
    /// The address of this machine that it came to.
    pub(super) local: Option<SocketAddr>,
}

/// Whether a request may call the server so: by a name of the loopback, by the address that it came to, or as the options have it.
fn knows_host(options: &ServeOptions, host: &str, ends: Option<ConnectionEnds>) -> bool {
    let name = without_port(host);
    let is_own = match name.parse::<IpAddr>() {
        Ok(ip) => ip.is_loopback() || ends.and_then(|ends| ends.local).is_some_and(|local| local.ip().to_canonical() == ip),
        Err(_) => name.eq_ignore_ascii_case("localhost"),
    };
    let mut allowed = options.allow_hosts.iter().chain([&options.host]);
    is_own || allowed.any(|allowed| allowed.eq_ignore_ascii_case(name))
}

/// Whether a page of an origin may ask: one of this server's own may.
fn knows_origin(options: &ServeOptions, origin: &str, host: &str) -> bool {
    let is_own = origin.split_once("://").is_some_and(|(_, own)| own == host);
    is_own || options.allow_origins.iter().any(|allowed| allowed == origin || allowed == "*")
}

/// `[::1]:80` and `example.org:80` without brackets and port.
fn without_port(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or(rest, |(name, _)| name),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

fn text(request: &Request, name: HeaderName) -> Option<&str> {
    request.headers().get(name).map(|value| value.to_str().unwrap_or_default())
}

/// The origin of the page that asks, where one does.
///
/// # Errors
/// This server has no such name, or pages of that origin may not ask it.
fn allowed_origin(options: &ServeOptions, request: &Request) -> Result<Option<HeaderValue>, ApiError> {
    let refuse = |message: String| Err(ApiError::new(StatusCode::FORBIDDEN, message));
    let (host, ends) = (text(request, header::HOST), request.extensions().get::<ConnectionEnds>().copied());
    if let Some(host) = host.filter(|host| !knows_host(options, host, ends)) {
        return refuse(format!(
            "`Host: {host}` is not a name of this server: it is started with `--allow-host` for further ones"
        ));
    }
    let origin = text(request, header::ORIGIN);
    if let Some(origin) = origin.filter(|origin| !knows_origin(options, origin, host.unwrap_or_default())) {
        return refuse(format!("pages of `{origin}` may not ask this server: it is started with `--allow-origin` for them"));
    }
    Ok(origin.and_then(|origin| HeaderValue::from_str(origin).ok()))
}

/// The reply to a browser that asks first what a page may send.
fn preflight(request: &Request) -> Option<Response> {
    let asks_first = request.method() == Method::OPTIONS && text(request, header::ACCESS_CONTROL_REQUEST_METHOD).is_some();
    // Clients have headers of their own, which change nothing here.
    let asked = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let told = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, PUT")),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, asked.unwrap_or(HeaderValue::from_static("authorization, content-type"))),
        (header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600")),
    ];
    asks_first.then(|| (StatusCode::NO_CONTENT, told).into_response())
}

fn no_json(request: &Request) -> Option<Response> {
    let has_body = [Method::POST, Method::PUT].contains(request.method());
    let kind = text(request, header::CONTENT_TYPE).unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let message = "send the body as `Content-Type: application/json`";
    let refused = || ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).into_response();
    (has_body && !kind.eq_ignore_ascii_case("application/json")).then(refused)
}

/// Lets through what comes to this server by its name, from no other origin, and as JSON.
pub(super) async fn only_from_allowed(State(options): State<Arc<ServeOptions>>, request: Request, next: Next) -> Response {
    let origin = match allowed_origin(&options, &request) {
        Ok(origin) => origin,
        Err(error) => return error.into_response(),
    };
    let reply = origin.as_ref().and_then(|_| preflight(&request)).or_else(|| no_json(&request));
    let mut response = match reply {
        Some(reply) => reply,
        None => next.run(request).await,
    };
    if let Some(origin) = origin {
        // A page of this origin may read the reply.
        response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        response.headers_mut().insert(header::VARY, HeaderValue::from_static("Origin"));
    }
    response
}
