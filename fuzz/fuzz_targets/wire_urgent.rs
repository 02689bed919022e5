//! Messages of urgent channels: no panic on any bytes, and what is accepted is in range and
//! encodes to the same bytes.

use pageferry_migration::wire::{
    PAGE_BYTES, Side, URGENT_BYTES, UrgentKind, UrgentMessage, urgent_reply, urgent_reply_confirmed,
};
use xxhash_rust::xxh3::xxh3_64;

pub(crate) fn run(data: &[u8]) {
    let Some((memory, rest)) = data.split_first_chunk::<8>() else {
        return;
    };
    let Some((&head, body)) = rest.split_first_chunk::<URGENT_BYTES>() else {
        return;
    };
    let memory_pages = u64::from_le_bytes(*memory);
    // A page made of what is left, repeated.
    let page: [u8; PAGE_BYTES] = core::array::from_fn(|at| match body.len() {
        0 => 0,
        len => body[at % len],
    });
    let mut sealed = head;
    let covered = [&head[..4], &head[8..]].concat();
    let covered = match head[0] {
        2 | 7 => [&covered[..], &page].concat(),
        _ => covered,
    };
    sealed[4..8].copy_from_slice(&(xxh3_64(&covered) as u32).to_le_bytes());
    for bytes in [head, sealed] {
        for from in [Side::Source, Side::Destination] {
            read(&bytes, from, memory_pages, &page);
        }
    }
}

fn read(bytes: &[u8; URGENT_BYTES], from: Side, memory_pages: u64, page: &[u8; PAGE_BYTES]) {
    let message = match UrgentMessage::decode(bytes, from, memory_pages) {
        Ok(message) => message,
        Err(error) => return drop(error.to_string()),
    };
    assert!(message.kind.is_sent_by(from));
    let is_answer = matches!(
        message.kind,
        UrgentKind::Page | UrgentKind::Zero | UrgentKind::Confirmed
    );
    let has_page = is_answer || message.kind == UrgentKind::Request;
    assert!(message.page.0 < memory_pages || !has_page && message.page.0 == 0);
    assert!(is_answer || message.at_source.is_none());
    assert_eq!(message.placed > 0, message.kind == UrgentKind::Receipt);
    let again = match message.kind {
        UrgentKind::Request => UrgentMessage::request(message.page),
        UrgentKind::Zero => urgent_reply(message.page, None, message.at_source),
        UrgentKind::Receipt => UrgentMessage::receipt(message.placed),
        UrgentKind::Alive => UrgentMessage::alive(),
        UrgentKind::Page if message.verify_page(page).is_ok() => {
            urgent_reply(message.page, Some(page), message.at_source)
        }
        UrgentKind::Confirmed if message.verify_page(page).is_ok() => {
            urgent_reply_confirmed(message.page, page, message.at_source)
        }
        UrgentKind::Page | UrgentKind::Confirmed => return,
    };
    assert_eq!(again, *bytes);
}
