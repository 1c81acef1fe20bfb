//! Who may ask: a page of another origin in somebody's browser may not, unless it is allowed, nor may a name that only leads here.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::ApiError;

#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionEnds {
    pub(super) peer: SocketAddr,
    /// The address of this machine that it came to.
    pub(super) local: Option<SocketAddr>,
}

/// What is allowed beyond the loopback's names and the address that is listened at.
#[derive(Clone, Debug)]
pub(super) struct AccessRules {
    /// Names and addresses, without ports.
    pub(super) hosts: Vec<String>,
    /// Origins as browsers send them: `https://example.org`; `*` for all.
    pub(super) origins: Vec<String>,
}

impl AccessRules {
    fn knows_host(&self, host: &str, ends: Option<ConnectionEnds>) -> bool {
        let name = without_port(host);
        let is_own = match name.parse::<IpAddr>() {
            Ok(ip) => ip.is_loopback() || ends.and_then(|ends| ends.local).is_some_and(|local| local.ip().to_canonical() == ip),
            Err(_) => name.eq_ignore_ascii_case("localhost"),
        };
        is_own || self.hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
    }

    /// Whether a page of an origin may ask: one of this server's own may.
    fn knows_origin(&self, origin: &str, host: &str) -> bool {
        let is_own = origin.split_once("://").is_some_and(|(_, own)| own == host);
        is_own || self.origins.iter().any(|allowed| allowed == origin || allowed == "*")
    }
}

/// `[::1]:80` and `example.org:80` without brackets and port.
fn without_port(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or(rest, |(name, _)| name),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

struct AccessVerdict {
    /// The reply, where nobody else is asked for one.
    reply: Option<Response>,
    /// The origin of the page that may read the reply.
    origin: Option<HeaderValue>,
    /// The headers that the page may send, where it asks for that first.
    preflight: Option<HeaderValue>,
}

fn judge(rules: &AccessRules, request: &Request) -> AccessVerdict {
    let text = |name: HeaderName| request.headers().get(name).map(|value| value.to_str().unwrap_or_default());
    let refuse = |status, message: String| {
        let reply = Some(ApiError::new(status, message).into_response());
        AccessVerdict { reply, origin: None, preflight: None }
    };
    let (host, ends) = (text(header::HOST), request.extensions().get::<ConnectionEnds>().copied());
    if let Some(host) = host.filter(|host| !rules.knows_host(host, ends)) {
        let message = format!("`Host: {host}` is not a name of this server: it is started with `--allow-host` for further ones");
        return refuse(StatusCode::FORBIDDEN, message);
    }
    let origin = text(header::ORIGIN);
    if let Some(origin) = origin.filter(|origin| !rules.knows_origin(origin, host.unwrap_or_default())) {
        let message = format!("pages of `{origin}` may not ask this server: it is started with `--allow-origin` for them");
        return refuse(StatusCode::FORBIDDEN, message);
    }
    let origin = origin.and_then(|origin| HeaderValue::from_str(origin).ok());
    let asks_first = request.method() == Method::OPTIONS && text(header::ACCESS_CONTROL_REQUEST_METHOD).is_some();
    if origin.is_some() && asks_first {
        // Clients have headers of their own, which change nothing here.
        let asked = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
        let preflight = Some(asked.unwrap_or_else(|| HeaderValue::from_static("authorization, content-type")));
        return AccessVerdict { reply: Some(StatusCode::NO_CONTENT.into_response()), origin, preflight };
    }
    let has_body = [Method::POST, Method::PUT].contains(request.method());
    let kind = text(header::CONTENT_TYPE).unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if has_body && !kind.eq_ignore_ascii_case("application/json") {
        let message = "send the body as `Content-Type: application/json`".to_owned();
        return AccessVerdict { origin, ..refuse(StatusCode::UNSUPPORTED_MEDIA_TYPE, message) };
    }
    AccessVerdict { reply: None, origin, preflight: None }
}

/// Lets through what comes to this server by its name, from no other origin, and as JSON.
pub(super) async fn only_from_allowed(State(rules): State<Arc<AccessRules>>, request: Request, next: Next) -> Response {
    let AccessVerdict { reply, origin, preflight } = judge(&rules, &request);
    let mut response = match reply {
        Some(reply) => reply,
        None => next.run(request).await,
    };
    if let Some(origin) = origin {
        tell_browser(response.headers_mut(), origin, preflight);
    }
    response
}

/// Says that a page of this origin may read the reply, and what it may send.
fn tell_browser(headers: &mut HeaderMap, origin: HeaderValue, preflight: Option<HeaderValue>) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::VARY, HeaderValue::from_static("Origin"));
    if let Some(asked) = preflight {
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, PUT"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    }
}
