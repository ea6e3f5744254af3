-- Mods that clients uploaded, and which mods are switched off.

-- Every version that was ever accepted: a run names the hash of the source it ran with.
create table mod_versions (
    name        text not null,
    -- SHA-256 of the source, hexadecimal
    hash        text not null,
    -- what was sent, as POST /v1/mods takes it
    upload      json not null,
    created_at  timestamptz not null,
    created_by  text,
    primary key (name, hash)
);

create table mods (
    name       text primary key,
    -- the version that runs take; null for a mod that is not uploaded and only switched off
    hash       text,
    enabled    boolean not null,
    changed_at timestamptz not null,
    changed_by text
);
