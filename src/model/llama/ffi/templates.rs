//! llama.cpp's built-in chat templates, which it knows by name and renders itself.

use llama_cpp_sys_2 as sys;
use std::ffi::{CStr, CString, c_char};

/// Returns the names of llama.cpp's chat templates.
#[must_use]
pub fn chat_template_names() -> Vec<String> {
    // SAFETY: a null pointer of length 0 only queries the number of names.
    let count = unsafe { sys::llama_chat_builtin_templates(std::ptr::null_mut(), 0) };
    let mut names: Vec<*const c_char> = vec![std::ptr::null(); usize::try_from(count).unwrap_or(0)];
    // SAFETY: the list has room for as many pointers as its length.
    unsafe { sys::llama_chat_builtin_templates(names.as_mut_ptr(), names.len()) };
    let named = names.into_iter().filter(|name| !name.is_null());
    // SAFETY: llama.cpp's names are constants of the program, and end with NUL.
    named.map(|name| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()).collect()
}

/// Renders messages, as role and content, with one of llama.cpp's chat templates. Returns `None` if there is none with
/// this name.
#[must_use]
pub fn apply_chat_template(name: &str, messages: &[(&str, &str)], add_generation_prompt: bool) -> Option<String> {
    // A C string ends at its first NUL.
    let text = |text: &str| CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default();
    let name = text(name);
    let texts: Vec<(CString, CString)> = messages.iter().map(|(role, content)| (text(role), text(content))).collect();
    let chat: Vec<sys::llama_chat_message> = texts
        .iter()
        .map(|(role, content)| sys::llama_chat_message { role: role.as_ptr(), content: content.as_ptr() })
        .collect();
    let mut buffer: Vec<u8> = Vec::new();
    loop {
        let room = i32::try_from(buffer.len()).ok()?;
        // SAFETY: the name and every message end with NUL and outlive the call; no more than `room` bytes are written
        // to the buffer, which has this size.
        let length = unsafe {
            sys::llama_chat_apply_template(
                name.as_ptr(),
                chat.as_ptr(),
                chat.len(),
                add_generation_prompt,
                buffer.as_mut_ptr().cast(),
                room,
            )
        };
        let length = usize::try_from(length).ok()?;
        if length <= buffer.len() {
            buffer.truncate(length);
            return Some(String::from_utf8_lossy(&buffer).into_owned());
        }
        buffer.resize(length, 0);
    }
}
