//! How many tokens a request takes.

mod lenient;

use std::fmt;

use hashbrown::HashTable;
use http::request::Parts;
use http::{Method, header};

use crate::error::{ConfigError, or_panic};

/// Finds the cost of a request, in tokens.
///
/// Implemented by [`CostTable`], by `u64` (the same for every request), and by closures from `&http::request::Parts` to
/// `u64`. A cost of 0 charges nothing and asks no store. A cost above the capacity can never pass: the answer is 429 without
/// `Retry-After`.
///
/// # Example
///
/// ```
/// use http::request::Parts;
/// use tower_token_bucket::{Limit, Quota};
///
/// // One token for each started MiB that the client announces.
/// let limit = Limit::new("upload", Quota::per_minute(600)).cost(|parts: &Parts| {
///     let length = parts.headers.get("content-length").and_then(|value| value.to_str().ok()?.parse().ok());
///     length.unwrap_or(0u64).div_ceil(1 << 20).max(1)
/// });
/// // The same for every request.
/// let limit = Limit::new("report", Quota::per_hour(60)).cost(5_u64);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no cost",
    note = "a cost is a `CostTable`, a `u64`, or a closure with the type of its argument: `|parts: &Parts| -> u64 {{ … }}`"
)]
pub trait Cost: Send + Sync + 'static {
    /// The cost, in tokens.
    fn cost(&self, parts: &Parts) -> u64;

    /// The cost of a CORS preflight (`OPTIONS` with `Access-Control-Request-Method`), in tokens: nothing, unless the
    /// implementer says otherwise.
    fn preflight_cost(&self, parts: &Parts) -> u64 {
        let _ = parts;
        0
    }

    /// The largest cost that is known in advance, and what has it, so that a cost that could never pass is found when
    /// the limit is built. `None` when costs are only known with the request.
    fn largest(&self) -> Option<(u64, String)> {
        None
    }

    /// The template of the route that a request is for, where no router has matched one: a label of the `metrics` feature.
    /// Of a few texts that are known in advance; never anything that a client has written.
    ///
    /// # Example
    ///
    /// ```
    /// use http::request::Parts;
    /// use tower_token_bucket::{Cost, Limit, Quota};
    ///
    /// /// Behind a gateway that names the operation in a header.
    /// struct ByOperation;
    ///
    /// impl ByOperation {
    ///     fn operation(parts: &Parts) -> Option<(&'static str, u64)> {
    ///         match parts.headers.get("x-operation")?.as_bytes() {
    ///             b"search" => Some(("search", 3)),
    ///             b"report" => Some(("report", 10)),
    ///             _ => None,
    ///         }
    ///     }
    /// }
    ///
    /// impl Cost for ByOperation {
    ///     fn cost(&self, parts: &Parts) -> u64 {
    ///         Self::operation(parts).map_or(1, |(_, cost)| cost)
    ///     }
    ///
    ///     fn largest(&self) -> Option<(u64, String)> {
    ///         Some((10, "report".to_owned()))
    ///     }
    ///
    ///     fn template(&self, parts: &Parts) -> Option<&str> {
    ///         Self::operation(parts).map(|(name, _)| name)
    ///     }
    /// }
    ///
    /// let limit = Limit::new("per-key", Quota::per_second(10)).cost(ByOperation);
    /// # let _ = limit;
    /// ```
    fn template(&self, parts: &Parts) -> Option<&str> {
        let _ = parts;
        None
    }
}

/// The same for every request.
impl Cost for u64 {
    fn cost(&self, _: &Parts) -> u64 {
        *self
    }

    fn largest(&self) -> Option<(u64, String)> {
        Some((*self, "every request".to_owned()))
    }
}

impl<F> Cost for F
where
    F: Fn(&Parts) -> u64 + Send + Sync + 'static,
{
    fn cost(&self, parts: &Parts) -> u64 {
        self(parts)
    }
}

/// The method whose costs count: `HEAD` costs what `GET` costs.
fn method_of(parts: &Parts) -> &Method {
    if parts.method == Method::HEAD { &Method::GET } else { &parts.method }
}

/// The template that the router has matched, where there is one.
#[cfg(feature = "axum")]
pub(crate) fn matched(parts: &Parts) -> Option<&str> {
    parts.extensions.get::<axum::extract::MatchedPath>().map(axum::extract::MatchedPath::as_str)
}

#[cfg(not(feature = "axum"))]
pub(crate) fn matched(_: &Parts) -> Option<&str> {
    None
}

/// The full path: inside a `nest` the router has cut the prefix from the one in the URI.
fn path_of(parts: &Parts) -> &str {
    #[cfg(feature = "axum")]
    if let Some(original) = parts.extensions.get::<axum::extract::OriginalUri>() {
        return original.path();
    }
    parts.uri.path()
}

/// Whether a request is a CORS preflight, which browsers send by themselves.
pub(crate) fn is_preflight(parts: &Parts) -> bool {
    parts.method == Method::OPTIONS && parts.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// The cost of each route, and a default for all that no entry names, 404s included.
///
/// An entry is `"METHOD /template"`, `"* /template"` for any method, or a template alone, which means the same. Templates
/// are those of axum 0.8: `/users/{id}`, `/files/{*rest}`. Names of parameters do not matter. An entry with the
/// request's method comes before one for any method. `HEAD` costs what `GET` costs.
///
/// Behind an axum router the cost comes from the router's own match, so nothing that a client writes in a path can
/// choose another cost: the entry of the template that the router has matched, with the prefix of each `nest`; or where there
/// is none, the most specific one that covers that template, as `/admin/{*rest}` covers `/admin/users/{id}` and `/orders/7`
/// does not cover `/orders/{id}`. Elsewhere (plain hyper or tower, a layer around the whole router) the table matches the path
/// itself, the full one also inside `nest`. A path there that a lenient server may take for another one (by its case,
/// doubled or trailing slashes, percent-encoding, `;parameters`) costs no less than that one.
///
/// A CORS preflight (`OPTIONS` with `Access-Control-Request-Method`) is free unless an entry names `OPTIONS`. In front of a
/// service that runs a handler whatever the method is, as tonic and axum's `any` and `fallback` do, name both: `.route("/{*path}", n)` and
/// `.route("OPTIONS /{*path}", n)`, or whoever calls a request a preflight pays nothing.
///
/// # Example
///
/// ```
/// use tower_token_bucket::CostTable;
///
/// let costs = CostTable::new(1)
///     .route("GET /search", 3)
///     .route("POST /reports/generate", 10)
///     .route("* /admin/{*rest}", 5)
///     .exempt("GET /health");
/// ```
#[derive(Clone)]
pub struct CostTable {
    default: u64,
    templates: Vec<Template>,
    /// Indices of `templates`, by template with the names of parameters left out.
    by_template: HashTable<usize>,
    /// Indices of `templates`, by path: a matcher for each method that has entries of its own, over those and the
    /// entries for any method, so that the most specific template that a method can reach decides.
    by_path: Vec<(Method, matchit::Router<usize>)>,
    /// The same for all other methods, over the entries for any method.
    by_path_any: matchit::Router<usize>,
    /// Servers differ about the path of a template, such as one with capitals.
    ambiguous: bool,
    /// A template has a parameter, so that it may cover others.
    patterns: bool,
}

/// A template and its costs.
#[derive(Clone, Debug)]
struct Template {
    text: Box<str>,
    by_method: Vec<(Method, u64)>,
    any: Option<u64>,
}

/// What the table says of a request.
struct Found {
    cost: u64,
    /// By an entry that names the method.
    own: bool,
}

impl Template {
    fn of_method(&self, method: &Method) -> Option<u64> {
        self.by_method.iter().find(|(known, _)| known == method).map(|(_, cost)| *cost)
    }

    fn find(&self, method: &Method) -> Option<Found> {
        let own = self.of_method(method).map(|cost| Found { cost, own: true });
        own.or(self.any.map(|cost| Found { cost, own: false }))
    }
}

impl CostTable {
    /// Creates a table in which every request has the `default` cost, in tokens.
    #[must_use]
    pub fn new(default: u64) -> Self {
        Self {
            default,
            templates: Vec::new(),
            by_template: HashTable::new(),
            by_path: Vec::new(),
            by_path_any: matchit::Router::new(),
            ambiguous: false,
            patterns: false,
        }
    }

    /// Sets the cost of `route`, in tokens.
    ///
    /// # Panics
    ///
    /// When `route` is malformed, or is in the table already; [`try_route`](Self::try_route) returns the error.
    #[must_use]
    #[track_caller]
    pub fn route(self, route: &str, cost: u64) -> Self {
        or_panic(self.try_route(route, cost))
    }

    /// Sets the cost of `route` to 0: it takes no tokens, needs no key and asks no store.
    ///
    /// # Panics
    ///
    /// When `route` is malformed, or is in the table already; [`try_exempt`](Self::try_exempt) returns the error.
    #[must_use]
    #[track_caller]
    pub fn exempt(self, route: &str) -> Self {
        self.route(route, 0)
    }

    /// Sets the cost of `route` to 0, like [`exempt`](Self::exempt).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Route`] when `route` is malformed, or is in the table already.
    pub fn try_exempt(self, route: &str) -> Result<Self, ConfigError> {
        self.try_route(route, 0)
    }

    /// Sets the cost of `route`, like [`route`](Self::route).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Route`] when `route` is malformed, or is in the table already.
    pub fn try_route(mut self, route: &str, cost: u64) -> Result<Self, ConfigError> {
        match self.insert(route, cost) {
            Ok(()) => Ok(self),
            Err(reason) => Err(ConfigError::Route { route: route.to_owned(), reason }),
        }
    }

    fn insert(&mut self, route: &str, cost: u64) -> Result<(), String> {
        let (method, text) = parse_route(route)?;
        self.patterns |= text.contains('{');
        self.ambiguous |= lenient::is_ambiguous(&unnamed(text).map(char::from).collect::<String>());
        let index = self.position(text).unwrap_or_else(|| {
            let index = self.templates.len();
            self.templates.push(Template { text: text.into(), by_method: Vec::new(), any: None });
            let templates = &self.templates;
            self.by_template.insert_unique(hash(text), index, |index| hash(&templates[*index].text));
            index
        });
        let template = &mut self.templates[index];
        let twice = || Err("it is in the table already (names of parameters do not count)".to_owned());
        match method {
            None => {
                if template.any.replace(cost).is_some() {
                    return twice();
                }
                insert_path(&mut self.by_path_any, text, index)?;
                for (method, router) in &mut self.by_path {
                    if template.of_method(method).is_none() {
                        insert_path(router, text, index)?;
                    }
                }
            }
            Some(method) => {
                if template.of_method(&method).is_some() {
                    return twice();
                }
                template.by_method.push((method.clone(), cost));
                if !self.by_path.iter().any(|(known, _)| *known == method) {
                    // The entries for any method, this template among them if it has one.
                    self.by_path.push((method.clone(), self.by_path_any.clone()));
                }
                let (_, router) = self.by_path.iter_mut().find(|(known, _)| *known == method).ok_or("unreachable")?;
                if self.templates[index].any.is_none() {
                    insert_path(router, text, index)?;
                }
            }
        }
        Ok(())
    }

    fn position(&self, template: &str) -> Option<usize> {
        let same = |index: &usize| unnamed(&self.templates[*index].text).eq(unnamed(template));
        self.by_template.find(hash(template), same).copied()
    }

    /// What the table says of the template that the router has matched: its own entry, or else the most specific one that
    /// covers all of its paths. Both are the operator's, so that what a client writes plays no part in it.
    #[cfg(feature = "axum")]
    fn find_template(&self, method: &Method, template: &str) -> Option<Found> {
        let own = self.position(template).and_then(|index| self.templates[index].find(method));
        own.or_else(|| if self.patterns { self.find_path(method, template) } else { None })
    }

    /// What the most specific template that matches the path says.
    fn find_path(&self, method: &Method, path: &str) -> Option<Found> {
        self.match_path(method, path)?.find(method)
    }

    /// The most specific template that matches the path and has a cost for the method.
    fn match_path(&self, method: &Method, path: &str) -> Option<&Template> {
        let router = self.by_path.iter().find(|(known, _)| known == method).map(|(_, router)| router);
        let found = router.unwrap_or(&self.by_path_any).at(path).ok()?;
        Some(&self.templates[*found.value])
    }

    /// What the most specific template says that a lenient server may find for the path; where that is two that differ
    /// in case, the dearer.
    fn find_lenient(&self, method: &Method, path: &[u8], any_case: bool) -> Option<Found> {
        let matches = self.templates.iter().filter_map(|template| {
            let found = template.find(method)?;
            Some((lenient::matches(path, &template.text, any_case)?, found))
        });
        matches.max_by(|a, b| (&a.0, a.1.cost).cmp(&(&b.0, b.1.cost))).map(|(_, found)| found)
    }

    /// The largest `charge` for what a request may be taken for: by the router's own match that is one thing; by a path
    /// about which servers differ it is several.
    fn most(&self, parts: &Parts, charge: impl Fn(Option<Found>) -> u64) -> u64 {
        if self.templates.is_empty() {
            return charge(None);
        }
        let method = method_of(parts);
        #[cfg(feature = "axum")]
        if let Some(template) = matched(parts) {
            return charge(self.find_template(method, template));
        }
        let path = path_of(parts);
        let strict = charge(self.find_path(method, path));
        if !self.ambiguous && !lenient::is_ambiguous(path) {
            return strict;
        }
        let Some(readings) = lenient::readings(path) else {
            return self.templates.iter().map(|template| charge(template.find(method))).fold(strict, u64::max);
        };
        let read = readings.iter().flat_map(|path| [(path, true), (path, false)]);
        // The path itself in its own case has been looked up.
        let read = read.enumerate().filter(|(i, _)| *i != 1).map(|(_, read)| read);
        read.map(|(path, any_case)| charge(self.find_lenient(method, path, any_case))).fold(strict, u64::max)
    }
}

impl Cost for CostTable {
    fn cost(&self, parts: &Parts) -> u64 {
        self.most(parts, |found| found.map_or(self.default, |found| found.cost))
    }

    fn preflight_cost(&self, parts: &Parts) -> u64 {
        self.most(parts, |found| found.filter(|found| found.own).map_or(0, |found| found.cost))
    }

    fn template(&self, parts: &Parts) -> Option<&str> {
        self.match_path(method_of(parts), path_of(parts)).map(|template| &*template.text)
    }

    fn largest(&self) -> Option<(u64, String)> {
        let mut largest = (self.default, "the default cost".to_owned());
        for template in &self.templates {
            let any = template.any.map(|cost| ("*", cost));
            let by_method = template.by_method.iter().map(|(method, cost)| (method.as_str(), *cost));
            for (method, cost) in by_method.chain(any) {
                if cost > largest.0 {
                    largest = (cost, format!("\"{method} {}\"", template.text));
                }
            }
        }
        Some(largest)
    }
}

impl fmt::Debug for CostTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CostTable").field("default", &self.default).field("templates", &self.templates).finish()
    }
}

fn insert_path(router: &mut matchit::Router<usize>, template: &str, index: usize) -> Result<(), String> {
    router.insert(template, index).map_err(|error| match error {
        matchit::InsertError::Conflict { with } => format!("it overlaps \"{with}\", and neither is more specific"),
        error => format!("{error} (templates are those of axum 0.8, such as /users/{{id}} or /files/{{*rest}})"),
    })
}

/// The method and the template of an entry.
fn parse_route(route: &str) -> Result<(Option<Method>, &str), String> {
    const METHODS: [Method; 8] = [
        Method::GET,
        Method::POST,
        Method::PUT,
        Method::DELETE,
        Method::PATCH,
        Method::OPTIONS,
        Method::CONNECT,
        Method::TRACE,
    ];
    let (method, template) =
        if route.starts_with('/') { ("*", route) } else { route.split_once(' ').unwrap_or((route, "")) };
    let method = match method {
        "*" => None,
        "HEAD" => return Err("HEAD costs what GET costs: name GET".to_owned()),
        method => Some(METHODS.into_iter().find(|known| known.as_str() == method).ok_or_else(|| {
            let known = METHODS.each_ref().map(Method::as_str).join(", ");
            format!("{method:?} is no method: allowed are {known}, and * for any (as in \"GET /users/{{id}}\")")
        })?),
    };
    if !template.starts_with('/') {
        return Err("a template starts with / and is one space behind the method, as in \"GET /users/{id}\"".to_owned());
    }
    if let Some(wrong) = template.chars().find(|c| c.is_whitespace() || c.is_control() || matches!(c, '?' | '#')) {
        return Err(format!("a template is a path and has no {wrong:?}"));
    }
    if template.contains("/:") || template.contains("/*") {
        return Err("parameters are written {id} and {*rest}".to_owned());
    }
    Ok((method, template))
}

/// The template's bytes without the names of its parameters: `/users/{id}` gives those of `/users/{}`.
fn unnamed(template: &str) -> impl Iterator<Item = u8> {
    let mut bytes = template.bytes().peekable();
    let mut escaped = false;
    let mut named = false;
    std::iter::from_fn(move || {
        let mut byte = bytes.next()?;
        if named {
            while byte != b'}' {
                byte = bytes.next()?;
            }
            named = false;
        } else if escaped {
            escaped = false;
        } else if byte == b'{' {
            // A doubled brace is a literal one.
            escaped = bytes.peek() == Some(&b'{');
            named = !escaped;
            if named && bytes.peek() == Some(&b'*') {
                bytes.next();
                // Any byte that no template has in this place.
                byte = b'*';
            }
        }
        Some(byte)
    })
}

/// FNV-1a of the template without the names of its parameters: templates are written by the operator, so nobody can
/// make them collide on purpose.
fn hash(template: &str) -> u64 {
    unnamed(template).fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(method: &str, path: &str) -> Parts {
        http::Request::builder().method(method).uri(path).body(()).unwrap().into_parts().0
    }

    fn table() -> CostTable {
        CostTable::new(1)
            .route("GET /users/{id}", 2)
            .route("* /users/{user_id}", 3)
            .route("/users/export", 50)
            .route("POST /users/{id}", 4)
            .route("GET /files/{*rest}", 5)
            .route("OPTIONS /search", 6)
            .exempt("GET /health")
    }

    #[test]
    fn the_most_specific_template_decides_then_the_method_then_any() {
        let table = table();
        for (method, path, cost) in [
            ("GET", "/users/7", 2),
            ("HEAD", "/users/7", 2),
            ("PUT", "/users/7", 3),
            ("PROPFIND", "/users/7", 3),
            ("POST", "/users/7", 4),
            ("GET", "/users/export", 50),
            ("POST", "/users/export", 50),
            ("GET", "/files/a/b", 5),
            ("POST", "/files/a/b", 1),
            ("OPTIONS", "/search", 6),
            ("GET", "/search", 1),
            ("GET", "/health", 0),
            ("HEAD", "/health?x", 0),
            ("GET", "/nowhere", 1),
        ] {
            assert_eq!(table.cost(&parts(method, path)), cost, "{method} {path}");
        }
    }

    #[test]
    fn a_preflight_is_free_unless_options_is_named() {
        let table = table();
        assert_eq!(table.preflight_cost(&parts("OPTIONS", "/search")), 6);
        assert_eq!(table.preflight_cost(&parts("OPTIONS", "/users/7")), 0, "by an entry for any method only");
        assert_eq!(table.preflight_cost(&parts("OPTIONS", "/nowhere")), 0);
    }

    #[test]
    fn a_method_reaches_past_a_more_specific_template_that_does_not_name_it() {
        let table = CostTable::new(1).route("GET /a/b", 2).route("POST /a/{x}", 9);
        assert_eq!(table.cost(&parts("POST", "/a/b")), 9);
    }

    #[test]
    fn a_path_that_a_lenient_server_takes_for_a_dearer_one_costs_as_much() {
        let table = CostTable::new(1)
            .route("GET /search", 7)
            .route("GET /files/{*rest}", 2)
            .route("GET /files/export", 50)
            .route("GET /Users/{id}/keys", 9)
            .route("GET /v{version}/{{x}}", 8)
            .exempt("GET /health");
        for (path, cost) in [
            ("/search", 7),
            ("/SEARCH", 7),
            ("/search/", 7),
            ("//search", 7),
            ("/search//", 7),
            ("/se%61rch", 7),
            ("/se%41rch", 7),
            ("/%2fsearch", 7),
            ("/search;v=1", 7),
            ("/;v=1/search;", 7),
            ("/search%", 1),
            ("/search%zz", 1),
            ("/files/a", 2),
            ("/files/A", 2),
            ("/files/export", 50),
            ("/files/%65xport", 50),
            ("/files//export", 50),
            ("/files/Export;x/", 50),
            ("/users/7/KEYS", 9),
            ("/V2/%7Bx%7D", 8),
            // What is free is free under its own name only.
            ("/health", 0),
            ("/Health", 1),
            ("/health/", 1),
            ("/", 1),
            ("//", 1),
            // Taken for what is most specific, not for what is dearest.
            ("/files/A/B", 2),
            ("/users/ABC/x", 1),
        ] {
            assert_eq!(table.cost(&parts("GET", path)), cost, "{path}");
            assert_eq!(table.cost(&parts("HEAD", path)), cost, "HEAD {path}");
        }
    }

    #[test]
    fn names_of_parameters_do_not_matter_and_escapes_do() {
        let same = |a: &str, b: &str| unnamed(a).eq(unnamed(b)) && hash(a) == hash(b);
        assert!(same("/users/{id}/x", "/users/{user}/x"));
        assert!(same("/f/{*a}", "/f/{*b}"));
        assert!(!same("/f/{a}", "/f/{*a}"));
        assert!(!same("/f/{{a}}", "/f/{{b}}"));
        assert!(!same("/f/{a}/x", "/f/{a}/y"));
        assert!(!same("/f/x", "/f/{x}"));
    }

    #[test]
    fn malformed_routes_are_refused_with_what_is_allowed() {
        for (route, part) in [
            ("FETCH", "\"FETCH\" is no method"),
            ("GET", "starts with /"),
            ("", "is no method"),
            ("get /x", "allowed are GET"),
            ("GET  /x", "one space"),
            ("GET x", "starts with /"),
            ("HEAD /x", "name GET"),
            ("GET /x?y=1", "'?'"),
            ("GET /x y", "' '"),
            ("GET /:id", "{id}"),
            ("GET /*", "{*rest}"),
            ("GET /{}", "axum 0.8"),
            ("GET /{a", "axum 0.8"),
            ("GET /{*a}/b", "axum 0.8"),
        ] {
            let error = CostTable::new(1).try_route(route, 1).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(&format!("{route:?}")), "{route}: {error}");
        }
    }

    #[test]
    fn an_entry_twice_is_refused_whatever_the_parameters_are_called() {
        for (first, second) in [("GET /u/{a}", "GET /u/{b}"), ("/u", "* /u")] {
            assert!(CostTable::new(1).route(first, 1).try_route(second, 1).is_err(), "{first} {second}");
        }
        assert!(CostTable::new(1).route("GET /u/{a}", 1).try_route("POST /u/{b}", 1).is_ok());
    }

    #[test]
    fn the_largest_cost_is_named() {
        assert_eq!(table().largest(), Some((50, "\"* /users/export\"".to_owned())));
        assert_eq!(CostTable::new(7).largest(), Some((7, "the default cost".to_owned())));
    }
}
