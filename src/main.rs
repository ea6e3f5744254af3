//! The `thunder` program; see [`thunder::cli`].

fn main() -> std::process::ExitCode {
    thunder::cli::main()
}
