//! Coding of attention rows: tiers T0 and T1.
