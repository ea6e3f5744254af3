//! Chat templates: messages and tools to the prompt's text, by the template inside the GGUF.
