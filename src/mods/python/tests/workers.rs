//! Lifecycle of workers: assignment of runs, ends of workers, and the affected calls.

use super::{HEADER, harness, lines, load, logits, no_exception, python_mods, raised, sampled, with_call_limit};
use crate::mods::builtin::testing::ModHarness;
use serde_json::json;
use std::process::Command;
use std::time::{Duration, Instant};

const STATE: &str = r"
calls = []
@mod
def stateful(event, actions, tokenizer):
    calls.append(event.step)
    print(len(calls))
";

#[test]
fn hanging_call_is_ended_and_other_runs_continue() {
    let source = STATE.replace(
        "    print(len(calls))",
        "    print(len(calls))\n    if isinstance(event, Sampled): spin()\n\ndef spin():\n    while True: pass\n",
    );
    let factory = with_call_limit(&source, Duration::from_millis(1500));
    let (mut first, mut second) = (harness(&factory), harness(&factory));
    assert_eq!(lines(&first.add(65)), ["1"]);
    assert_eq!(lines(&second.add(65)), ["2"]);
    let began = Instant::now();
    let stuck = std::thread::spawn(move || {
        let reply = sampled(&mut first, b'a');
        (first, reply)
    });
    std::thread::sleep(Duration::from_millis(300));
    // This call waits in the supervisor's queue after the blocked call. The next worker serves it, with new state.
    let reply = second.add(66);
    assert_eq!(lines(&reply), ["1"]);
    let (mut first, reply) = stuck.join().unwrap();
    assert!(began.elapsed() < Duration::from_secs(20));
    let (message, traceback) = raised(&reply);
    assert_eq!(message, "deadline of 1500 ms exceeded");
    assert!(traceback.contains("in spin") && traceback.contains("test.py"), "{traceback}");
    assert!(!traceback.contains("bootstrap"), "{traceback}");
    assert_eq!(reply.logs[0].message, "3", "the earlier output is kept");
    assert_eq!(lines(&first.add(67)), ["2"]);
}

#[test]
fn elapsed_time_of_mod_is_bounded_by_server() {
    let source = "
import itertools, time
times = itertools.count(10**18, 10**15)
@mod
def boasts(event, actions):
    time.perf_counter_ns = lambda: next(times)
";
    let mut harness = harness(&load(source));
    for _ in 0..2 {
        let began = Instant::now();
        let reply = harness.add(65);
        no_exception(&reply);
        assert!(reply.elapsed <= began.elapsed(), "{:?}", reply.elapsed);
    }
}

#[test]
fn dead_worker_is_replaced() {
    let source = STATE.replace(
        "    print(len(calls))",
        "    print(len(calls))\n    if isinstance(event, Sampled): os._exit(3)\n    if isinstance(event, ForwardPass): os.kill(os.getpid(), 9)",
    );
    let factory = load(&source);
    let mut harness = harness(&factory);
    let reply = sampled(&mut harness, b'a');
    assert_eq!(raised(&reply).0, "the worker ended with exit code 3");
    assert_eq!(lines(&harness.add(65)), ["1"]);
    let reply = harness.forward(&logits());
    assert_eq!(raised(&reply).0, "the worker was ended by signal 9 (SIGKILL)");
    assert_eq!(lines(&harness.add(65)), ["1"]);
}

#[test]
fn new_worker_does_not_continue_holdback() {
    let factory = load(
        r"
@mod(holdback=2)
def holds_back(event, actions):
    if isinstance(event, Sampled): os._exit(3)
    if event.added_tokens == [65]: event.hold_back(9, discard=True)
",
    );
    let mut harness = harness(&factory);
    no_exception(&harness.add(65));
    assert_eq!((harness.instance.holdback(), harness.instance.discard_from()), (9, Some(0)));
    raised(&sampled(&mut harness, b'a'));
    no_exception(&harness.add(66));
    assert_eq!((harness.instance.holdback(), harness.instance.discard_from()), (2, None));
}

#[test]
fn worker_death_between_calls_fails_no_call() {
    let factory = load(
        r"
import threading
@mod
def later(event, actions):
    if isinstance(event, Sampled): threading.Timer(0.1, lambda: os._exit(1)).start()
    print(event.step)
",
    );
    let mut harness = harness(&factory);
    no_exception(&sampled(&mut harness, b'a'));
    std::thread::sleep(Duration::from_millis(500));
    no_exception(&harness.add(65));
}

#[test]
fn worker_that_died_is_dropped_when_its_run_ends() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let factory = load(
        r"
@mod
def prints(event, actions):
    print(os.getpid()); print(os.getcwd())
",
    );
    let mut harness = harness(&factory);
    let reply = harness.add(65);
    let [pid, directory] = lines(&reply)[..] else { panic!("two lines") };
    let wait_until = |is_done: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !is_done() {
            assert!(begun.elapsed() < Duration::from_mins(1));
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    assert!(Command::new("kill").args(["-9", pid]).status().unwrap().success());
    let stat = format!("/proc/{pid}/stat");
    wait_until(&|| std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") Z ")));
    harness.instance.finished();
    // The directory is removed with the worker, which a run no longer needs.
    wait_until(&|| !std::path::Path::new(directory).exists());
}

#[test]
fn worker_that_computes_between_calls_is_ended_during_its_run() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let source = r#"
import hashlib, threading
def compute(): hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
@mod
def computes(event, actions):
    if isinstance(event, Sampled):
        for _ in range(8): threading.Thread(target=compute, daemon=True).start()
    print(os.getpid())
"#;
    let mut mods = python_mods();
    mods.limits.idle_cpu = Duration::from_millis(200);
    let factory = mods.load_one("computes", &format!("{HEADER}{source}"), None).unwrap();
    let mut harness = harness(&factory);
    let sampled = sampled(&mut harness, b'a');
    let first = lines(&sampled);
    let begun = Instant::now();
    loop {
        // Long enough for checks without calls, and for the delay until the next worker starts.
        std::thread::sleep(Duration::from_secs(3));
        let reply = harness.add(65);
        match &reply.exception {
            None if lines(&reply) != first => break,
            None => {}
            Some(exception) => {
                let message = &exception.message;
                assert!(message.starts_with("the worker was ended: it used "), "{message}");
                let limit = " ms of CPU time without a call; the maximum is 200 ms; the next attempt is in ";
                assert!(message.contains(limit), "{message}");
            }
        }
        assert!(begun.elapsed() < Duration::from_mins(2), "the worker was not ended");
    }
}

#[test]
fn stopped_worker_is_killed_and_reported() {
    let stopped = if cfg!(target_os = "linux") { "; a signal has stopped the worker" } else { "" };
    let source = "
import signal, threading
def halt(): os.kill(os.getpid(), signal.SIGSTOP)
@mod
def halts(event, actions):
    if isinstance(event, Sampled): halt()
    if isinstance(event, ForwardPass): threading.Timer(0.1, halt).start()
";
    let factory = with_call_limit(source, Duration::from_secs(2));
    let mut harness = harness(&factory);
    let reply = sampled(&mut harness, b'a');
    let (message, traceback) = raised(&reply);
    assert_eq!(message, format!("deadline of 2000 ms exceeded{stopped}"));
    assert!(traceback.contains("in halt"), "{traceback}");
    no_exception(&harness.add(65));
    no_exception(&harness.forward(&logits()));
    std::thread::sleep(Duration::from_millis(400));
    assert_eq!(raised(&harness.add(65)).0, format!("deadline of 2000 ms exceeded{stopped}"), "between two calls");
    no_exception(&harness.add(65));

    let mut mods = python_mods();
    mods.limits.import = Duration::from_secs(10);
    let began = Instant::now();
    let source = format!("{HEADER}{}", source.replace("@mod", "halt()\n@mod"));
    let error = mods.load_one("halts", &source, None).err().unwrap();
    assert!(error.to_string().ends_with(&format!("deadline of 10000 ms exceeded{stopped}")), "{error}");
    assert!(error.traceback().is_some_and(|traceback| traceback.contains("halts.py")), "{:?}", error.traceback());
    assert!(began.elapsed() < Duration::from_mins(1));
}

#[test]
fn output_of_an_earlier_call_does_not_explain_a_crash() {
    let factory = load(
        "@mod(workers=1)\ndef dies(e, a):\n    if isinstance(e, Sampled): os._exit(3)\n    os.write(1, b'raw\\n')\n",
    );
    let mut first = harness(&factory);
    no_exception(&first.add(65));
    assert_eq!(raised(&sampled(&mut harness(&factory), b'a')), ("the worker ended with exit code 3", ""));
}

#[test]
fn output_explains_a_violation_of_the_protocol() {
    let factory = load(
        r#"
from thunder_mods.worker.channel import Channel
send = Channel.send_encoded
@mod
def violates(e, a):
    os.write(1, b'raw\n')
    Channel.send_encoded = lambda self, *message: send(self, b'{"kind":"scored","score":null}')
"#,
    );
    let message = "the worker violated the protocol: it did not send a reply to a call";
    assert_eq!(raised(&sampled(&mut harness(&factory), b'a')), (message, "raw"));
}

#[test]
fn repeated_worker_failures_restart_after_delay() {
    let factory = load("@mod\ndef dies(e, a):\n    if isinstance(e, Sampled): os._exit(3)\n");
    let mut harness = harness(&factory);
    for _ in 0..2 {
        assert_eq!(raised(&sampled(&mut harness, b'a')).0, "the worker ended with exit code 3");
    }
    let reply = harness.add(65);
    assert!(
        raised(&reply).0.starts_with("the worker ended with exit code 3; the next attempt is in "),
        "{:?}",
        reply.exception
    );
    std::thread::sleep(Duration::from_millis(600));
    no_exception(&harness.add(65));
    assert_eq!(raised(&sampled(&mut harness, b'a')).0, "the worker ended with exit code 3");
    no_exception(&harness.add(65));
}

#[test]
fn runs_interleave_and_finished_hook_is_called() {
    let factory = load(
        r#"
from quote_mod_sdk import get_conversation, tool_call_pairs
texts, ended = {}, []
@mod(events=["Added"])
def collect(event, actions, tokenizer):
    texts.setdefault(event.config["who"], []).append(event.text)
    print(texts[event.config["who"]], ended, get_conversation(), tool_call_pairs())
def finished(request_id):
    ended.append(request_id)
"#,
    );
    let mut first = ModHarness::new(factory.as_ref(), &json!({"who": "a"}));
    let mut second = ModHarness::new(factory.as_ref(), &json!({"who": "b"}));
    assert!(!first.instance.handles().contains(crate::events::EventType::ForwardPass));
    assert_eq!(lines(&first.add(65)), ["['A'] [] [] []"]);
    assert_eq!(lines(&second.add(66)), ["['B'] [] [] []"]);
    assert_eq!(lines(&first.add(67)), ["['A', 'C'] [] [] []"]);
    first.instance.finished();
    drop(first);
    assert_eq!(lines(&second.add(68)), ["['B', 'D'] ['request'] [] []"]);
}

#[test]
fn many_parallel_runs_complete() {
    let factory = load("@mod\ndef echo(event, actions):\n    print(event.context_info.generated)\n");
    let threads: Vec<_> = (0..8)
        .map(|index| {
            let mut harness = harness(&factory);
            std::thread::spawn(move || {
                for count in 1..=20 {
                    let reply = harness.add(index);
                    assert_eq!(lines(&reply), [format!("{:?}", vec![index; count])]);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn workers_yield_to_the_decoding_threads() {
    let factory = load("@mod\ndef says(e, a): print(os.getpriority(os.PRIO_PROCESS, 0))\n");
    let own = rustix::process::getpriority_process(None).unwrap();
    assert_eq!(lines(&harness(&factory).add(65)), [(own + 5).min(19).to_string()]);
}

#[test]
fn runs_are_distributed_over_workers() {
    let factory = load("@mod(workers=2)\ndef who(e, a): print(os.getpid())\n");
    let mut harnesses: Vec<ModHarness> = (0..4).map(|_| harness(&factory)).collect();
    let mut pids: Vec<String> = harnesses.iter_mut().map(|harness| lines(&harness.add(65))[0].to_owned()).collect();
    for (harness, pid) in harnesses.iter_mut().zip(&pids) {
        assert_eq!(lines(&harness.add(66)), [pid.as_str()], "a run stays with its worker");
    }
    pids.sort();
    pids.dedup();
    assert_eq!(pids.len(), 2);
}

#[test]
fn threads_of_mod_get_their_own_answers() {
    let factory = load(
        r#"
import threading
@mod
def asks(event, actions, tokenizer):
    wrong = []
    def query(letter):
        for count in range(1, 60):
            if tokenizer.encode(letter * count) != [ord(letter)] * count: wrong.append((letter, count))
    threads = [threading.Thread(target=query, args=(letter,)) for letter in "abcd"]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(wrong)
"#,
    );
    assert_eq!(lines(&harness(&factory).add(65)), ["[]"]);
}

#[test]
fn thread_cannot_query_between_calls() {
    let factory = load(
        r#"
import threading
reply = []
@mod
def later(event, actions, tokenizer):
    if isinstance(event, Added):
        print(reply)
        return
    def query():
        time.sleep(0.3)
        try: reply.append(tokenizer.encode("zz"))
        except RuntimeError as error: reply.append(str(error))
    threading.Thread(target=query).start()
"#,
    );
    let mut harness = harness(&factory);
    no_exception(&sampled(&mut harness, b'a'));
    std::thread::sleep(Duration::from_millis(800));
    assert_eq!(lines(&harness.add(65)), ["['the tokenizer can only query the server during a call']"]);
}
