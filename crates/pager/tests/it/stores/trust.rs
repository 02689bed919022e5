//! Only peers with a certificate get bytes, and only bytes that are shared.

use crate::stores::scene::{PLAIN, Scene, memory, plain_server, plain_store, store_of, talk};
use pageferry_pager::Store;
use pageferry_pager::stores::peer::{Limits, PeerStore, ServeError, Server, ShareError, Shares};
use pageferry_testkit::certificates::{Authority, Validity};
use pageferry_transport::{Listener, PlainPolicy};
use std::os::unix::fs::symlink;

fn refused(store: &PeerStore, address: &str) -> String {
    store.open(address).unwrap_err().to_string()
}

#[test]
fn no_name_leads_out_of_the_shared_directory() {
    let scene = Scene::new("escape");
    std::fs::write(scene.scratch.path("secret"), memory(1, 1)).unwrap();
    let out = scene.scratch.path("secret");
    symlink(&out, scene.file("absolute")).unwrap();
    symlink("../secret", scene.file("relative")).unwrap();
    symlink("..", scene.file("up")).unwrap();
    symlink("loop", scene.file("loop")).unwrap();
    std::fs::create_dir(scene.file("directory")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        scene.file("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    std::fs::write(scene.file("inside"), memory(2, 1)).unwrap();
    symlink("inside", scene.file("link")).unwrap();
    for name in [
        "absolute",
        "relative",
        "up/secret",
        "loop",
        "directory",
        "fifo",
        "nothing",
        "inside/below",
    ] {
        let why = scene.refusal(name);
        assert!(
            why.contains("no file is shared under this name"),
            "{name}: {why}"
        );
    }
    assert_eq!(scene.open("link").bytes(), 4096);
}

/// The server does not rely on the client's check.
#[test]
fn a_server_refuses_names_with_detours() {
    let scene = Scene::new("detours");
    std::fs::write(scene.scratch.path("secret"), memory(1, 1)).unwrap();
    let shared = scene.scratch.path("shared");
    let shares = Shares::of_directory(&shared).unwrap();
    let server = plain_server(shares, Limits::default());
    for name in [
        "../secret",
        "./../secret",
        "/etc/passwd",
        "a//b",
        "",
        ".",
        "..",
        "a\0b",
    ] {
        let why = talk(&server).unwrap().open(name).unwrap_err().to_string();
        let expected = if name.is_empty() {
            "outside 1 to 1024"
        } else {
            "no file is shared"
        };
        assert!(why.contains(expected), "{name}: {why}");
    }
}

#[test]
fn named_files_are_shared_and_nothing_beside_them() {
    let scene = Scene::new("named");
    std::fs::write(scene.file("a"), memory(1, 1)).unwrap();
    std::fs::write(scene.file("b"), memory(2, 1)).unwrap();
    let shares = Shares::of_files([("web/memory".to_owned(), scene.file("a"))]).unwrap();
    let server = plain_server(shares, Limits::default());
    let store = plain_store();
    let at = |name: &str| format!("pageferry://{}/{name}", server.address().authority());
    assert_eq!(store.open(&at("web/memory")).unwrap().bytes(), 4096);
    assert!(refused(&store, &at("b")).contains("no file is shared"));
    for wrong in ["", "/a", "a/../b", "a/"] {
        let shares = Shares::of_files([(wrong.to_owned(), scene.file("a"))]);
        assert!(matches!(shares, Err(ShareError::Name(_))), "{wrong}");
    }
    assert!(Shares::of_directory(&scene.file("a")).is_err());
}

#[test]
fn a_client_needs_a_certificate_of_the_servers_authority() {
    let scene = Scene::new("client");
    std::fs::write(scene.file("memory"), memory(1, 1)).unwrap();
    let address = scene.address("memory");
    let plain = plain_store();
    let why = refused(&plain, &address);
    assert!(why.contains("the destination requires TLS"), "{why}");

    let other = Authority::new("another CA");
    // It trusts the server, and the server does not trust it.
    let stranger = scene
        .authority
        .trusted_by(other.issue(&["node"], Validity::Now));
    let why = refused(&store_of(&stranger, None), &address);
    assert!(
        why.contains("the peer refused this side's certificate"),
        "{why}"
    );

    let expired = scene.authority.issue(&["node"], Validity::Past);
    let why = refused(&store_of(&expired, None), &address);
    assert!(why.contains("expired"), "{why}");
}

#[test]
fn a_server_needs_a_certificate_for_its_name() {
    let scene = Scene::new("server");
    std::fs::write(scene.file("memory"), memory(1, 1)).unwrap();
    let address = scene.address("memory");
    let other = Authority::new("another CA");
    let distrusts = other.issue(&["node"], Validity::Now);
    let why = refused(&store_of(&distrusts, None), &address);
    assert!(
        why.contains("no CA of this side signed the peer's certificate"),
        "{why}"
    );
    let here = scene.authority.issue(&["node"], Validity::Now);
    let why = refused(&store_of(&here, Some("elsewhere")), &address);
    assert!(why.contains("not for `elsewhere`"), "{why}");
    let why = refused(
        &store_of(&here, None),
        &format!(
            "pageferry://localhost:{}/memory",
            scene.socket_address().port()
        ),
    );
    assert!(why.contains("not for `localhost`"), "{why}");
}

#[test]
fn a_client_with_tls_is_told_that_the_server_has_none() {
    let scene = Scene::new("plain");
    let shares = Shares::of_directory(&scene.scratch.path("shared")).unwrap();
    let server = plain_server(shares, Limits::default());
    let why = refused(
        &scene.store(),
        &format!("pageferry://{}/memory", server.address().authority()),
    );
    assert!(why.contains("the peer does not use TLS"), "{why}");
}

#[test]
fn plain_tcp_stays_within_the_host() {
    let store = plain_store();
    // An address for documentation: nothing is sent.
    let why = refused(&store, "pageferry://192.0.2.1:7440/memory");
    assert!(
        why.contains("plain TCP to 192.0.2.1:7440 would show"),
        "{why}"
    );
    let everywhere = || Listener::bind(&"0.0.0.0:0".parse().unwrap()).unwrap();
    let shares = || Shares::of_files([]).unwrap();
    let refused = Server::start(everywhere(), shares(), None, PLAIN.1);
    assert!(matches!(refused, Err(ServeError::Plain(_))));
    assert!(Server::start(everywhere(), shares(), None, PlainPolicy::Anywhere).is_ok());
}
