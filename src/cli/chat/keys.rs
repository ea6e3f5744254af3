//! The keyboard while an answer comes: Esc stops it, what else is typed is kept for the next line.

use nix::sys::termios::{self, LocalFlags, SetArg, SpecialCharacterIndices, Termios};
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use tokio::sync::Notify;

const ESCAPE: u8 = 0x1b;

/// Listens to the terminal until it is dropped; Ctrl-C remains a signal.
pub struct Keys {
    terminal: Option<(File, Termios)>,
    listener: Option<JoinHandle<Vec<u8>>>,
    over: Arc<AtomicBool>,
    escape: Arc<Notify>,
}

impl Keys {
    /// Begins to listen, where there is a terminal.
    pub fn listen(terminal: bool) -> Self {
        let mut keys = Self { terminal: None, listener: None, over: Arc::default(), escape: Arc::default() };
        // Without its terminal the answer comes all the same; Ctrl-C stops it.
        if terminal && let Some((tty, before, listening)) = quiet() {
            let (over, escape) = (Arc::clone(&keys.over), Arc::clone(&keys.escape));
            keys.listener = Some(std::thread::spawn(move || listen(listening, &over, &escape)));
            keys.terminal = Some((tty, before));
        }
        keys
    }

    /// Returns when Esc was pressed.
    pub async fn escape(&self) {
        self.escape.notified().await;
    }

    /// Gives the terminal back, and what was typed that is text.
    pub fn end(mut self) -> String {
        self.stop()
    }

    fn stop(&mut self) -> String {
        self.over.store(true, Ordering::Release);
        let typed = self.listener.take().and_then(|listener| listener.join().ok()).unwrap_or_default();
        if let Some((tty, before)) = self.terminal.take() {
            // The line editor sets its own mode in any case.
            let _ = termios::tcsetattr(&tty, SetArg::TCSANOW, &before);
        }
        text(&String::from_utf8_lossy(&typed))
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What was typed as the line editor would have it: Enter begins a line, Backspace takes the last character away.
fn text(typed: &str) -> String {
    let mut text = String::new();
    for c in typed.chars() {
        match c {
            '\r' | '\n' => text.push('\n'),
            '\u{7f}' | '\u{8}' => drop(text.pop()),
            '\u{fffd}' => {}
            c if c.is_control() => {}
            c => text.push(c),
        }
    }
    text.trim_end_matches('\n').to_owned()
}

/// The terminal in a mode in which keys come at once and are not shown: to restore it, and to read from.
fn quiet() -> Option<(File, Termios, File)> {
    let tty = File::options().read(true).write(true).open("/dev/tty").ok()?;
    let before = termios::tcgetattr(&tty).ok()?;
    let mut quiet = before.clone();
    quiet.local_flags.remove(LocalFlags::ICANON | LocalFlags::ECHO);
    // A read returns after a tenth of a second without a key.
    quiet.control_chars[SpecialCharacterIndices::VMIN as usize] = 0;
    quiet.control_chars[SpecialCharacterIndices::VTIME as usize] = 1;
    let reader = tty.try_clone().ok()?;
    termios::tcsetattr(&tty, SetArg::TCSANOW, &quiet).ok()?;
    Some((tty, before, reader))
}

fn listen(mut tty: File, over: &AtomicBool, escape: &Notify) -> Vec<u8> {
    let mut typed = Vec::new();
    let mut bytes = [0; 64];
    while !over.load(Ordering::Acquire) {
        match tty.read(&mut bytes) {
            Ok(count) => match bytes[..count].iter().position(|&byte| byte == ESCAPE) {
                None => typed.extend_from_slice(&bytes[..count]),
                Some(at) => {
                    typed.extend_from_slice(&bytes[..at]);
                    // At the end it is the key; arrows and others send more behind it.
                    if at + 1 == count {
                        escape.notify_one();
                    }
                }
            },
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    typed
}

#[cfg(test)]
mod tests {
    use super::text;

    #[test]
    fn what_was_typed_is_the_beginning_of_the_next_line() {
        assert_eq!(text("abd\u{7f}c\u{15}\rx\r"), "abc\nx");
    }
}
