//! Output of commands: results on standard output, messages on standard error.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write, stdout};

/// Writes a line to standard error. Replaces the macro of the standard library, which panics if standard error is closed.
macro_rules! eprintln {
    ($($text:tt)*) => {
        // There is no place left to report the error.
        drop(std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{}\n", format_args!($($text)*))))
    };
}

/// Writes text to standard output immediately.
pub fn write(text: impl AsRef<[u8]>) -> io::Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_ref())?;
    out.flush()
}

/// Writes a result. If the reader has closed the pipe, like `head`, the result is discarded: the command finishes its work.
pub fn print(text: impl AsRef<[u8]>) -> io::Result<()> {
    match write(text) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Writes a line of a result, like [`print()`].
pub fn print_line(text: impl Display) -> io::Result<()> {
    print(format!("{text}\n"))
}

/// Returns true if the reader of standard output has closed the pipe.
pub fn is_closed(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}
