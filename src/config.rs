//! Settings: flags over environment over defaults, validated once.
