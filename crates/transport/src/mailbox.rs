//! The queue of a thread that also waits for descriptors.

use crate::bell::Bell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Letters from any thread to one thread, in order. That thread sleeps in poll(2) on this
/// descriptor, among others.
#[derive(Debug)]
pub struct Mailbox<T> {
    letters: Mutex<VecDeque<T>>,
    bell: Bell,
}

impl<T> Mailbox<T> {
    /// An empty one.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            letters: Mutex::default(),
            bell: Bell::new()?,
        })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a letter and wakes the thread.
    pub fn post(&self, letter: T) {
        self.lock().push_back(letter);
        self.bell.ring();
    }

    /// As [`Self::post`]. Letters that `older` finds are of no use beside this one, and are
    /// dropped.
    pub fn post_instead_of(&self, letter: T, older: impl Fn(&T) -> bool) {
        let mut letters = self.lock();
        letters.retain(|letter| !older(letter));
        letters.push_back(letter);
        drop(letters);
        self.bell.ring();
    }

    /// Takes the oldest letter. After `None`, the descriptor is unreadable until the next letter.
    pub fn take(&self) -> Option<T> {
        if let Some(letter) = self.lock().pop_front() {
            return Some(letter);
        }
        self.bell.hush();
        // A letter that came before the bell was hushed.
        self.lock().pop_front()
    }
}

impl<T> AsFd for Mailbox<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn is_readable(mailbox: &Mailbox<u32>) -> bool {
        let mut fds = [PollFd::new(mailbox, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    }

    #[test]
    fn letters_keep_their_order_and_wake_until_all_are_taken() {
        let mailbox = Mailbox::new().unwrap();
        assert!(!is_readable(&mailbox));
        mailbox.post(1);
        mailbox.post(2);
        assert!(is_readable(&mailbox));
        assert_eq!((mailbox.take(), mailbox.take()), (Some(1), Some(2)));
        assert_eq!(mailbox.take(), None);
        assert!(!is_readable(&mailbox));
    }

    #[test]
    fn a_letter_takes_the_place_of_those_it_makes_useless() {
        let mailbox = Mailbox::new().unwrap();
        for letter in [1, 2, 3] {
            mailbox.post(letter);
        }
        mailbox.post_instead_of(4, |older| older % 2 == 1);
        assert!(is_readable(&mailbox));
        assert_eq!((mailbox.take(), mailbox.take()), (Some(2), Some(4)));
        assert_eq!(mailbox.take(), None);
    }
}
