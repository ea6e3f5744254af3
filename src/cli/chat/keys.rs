//! The keyboard during an answer: Esc stops the answer, other text is kept for the next line.

use nix::sys::termios::{self, LocalFlags, SetArg, SpecialCharacterIndices, Termios};
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use tokio::sync::Notify;

const ESCAPE: u8 = 0x1b;

/// A listener for keys, active until it is dropped. Ctrl-C remains a signal.
pub struct KeyListener {
    terminal: Option<(File, Termios)>,
    listener: Option<JoinHandle<Vec<u8>>>,
    stopped: Arc<AtomicBool>,
    escape: Arc<Notify>,
}

impl KeyListener {
    /// Starts listening if there is a terminal.
    pub fn listen(terminal: bool) -> Self {
        let mut keys = Self { terminal: None, listener: None, stopped: Arc::default(), escape: Arc::default() };
        // Without a terminal, only Ctrl-C stops the answer.
        if terminal && let Some((tty, before, listening)) = open_raw_terminal() {
            let (stopped, escape) = (Arc::clone(&keys.stopped), Arc::clone(&keys.escape));
            keys.listener = Some(std::thread::spawn(move || listen(listening, &stopped, &escape)));
            keys.terminal = Some((tty, before));
        }
        keys
    }

    /// Returns when Esc is pressed.
    pub async fn escape(&self) {
        self.escape.notified().await;
    }

    /// Restores the terminal and returns the typed text.
    pub fn end(mut self) -> String {
        self.stop()
    }

    fn stop(&mut self) -> String {
        self.stopped.store(true, Ordering::Release);
        let typed = self.listener.take().and_then(|listener| listener.join().ok()).unwrap_or_default();
        if let Some((tty, before)) = self.terminal.take() {
            // On failure, the line editor still sets its own mode.
            let _ = termios::tcsetattr(&tty, SetArg::TCSANOW, &before);
        }
        text(&String::from_utf8_lossy(&typed))
    }
}

impl Drop for KeyListener {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Converts typed keys to text like the line editor: Enter begins a line, Backspace removes the last character.
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

/// Puts the terminal into a mode without line buffering and echo. Returns a handle and settings to restore it, and a
/// handle to read from.
fn open_raw_terminal() -> Option<(File, Termios, File)> {
    let tty = File::options().read(true).write(true).open("/dev/tty").ok()?;
    let before = termios::tcgetattr(&tty).ok()?;
    let mut raw = before.clone();
    raw.local_flags.remove(LocalFlags::ICANON | LocalFlags::ECHO);
    // Without a key, a read returns after 0.1 s.
    raw.control_chars[SpecialCharacterIndices::VMIN as usize] = 0;
    raw.control_chars[SpecialCharacterIndices::VTIME as usize] = 1;
    let reader = tty.try_clone().ok()?;
    termios::tcsetattr(&tty, SetArg::TCSANOW, &raw).ok()?;
    Some((tty, before, reader))
}

fn listen(mut tty: File, stopped: &AtomicBool, escape: &Notify) -> Vec<u8> {
    let mut typed = Vec::new();
    let mut bytes = [0; 64];
    while !stopped.load(Ordering::Acquire) {
        match tty.read(&mut bytes) {
            Ok(count) => match bytes[..count].iter().position(|&byte| byte == ESCAPE) {
                None => typed.extend_from_slice(&bytes[..count]),
                Some(at) => {
                    typed.extend_from_slice(&bytes[..at]);
                    // A single escape byte is the Esc key. Arrow and other keys send more bytes after it.
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
    fn typed_keys_become_the_beginning_of_the_next_line() {
        assert_eq!(text("abd\u{7f}c\u{15}\rx\r"), "abc\nx");
    }
}
