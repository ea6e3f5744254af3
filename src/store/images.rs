//! Files of images in prompts. A tenant stores each file once, and it is removed with the last run that refers to it.

use super::pool::PgConnection;
use super::scope::owners;
use super::text::clean;
use super::{Error, Store};
use crate::events::{ImageFile, RunId, RunStart, Scope, Tenant};
use std::collections::BTreeMap;
use uuid::Uuid;

/// Statement that reads the image `$1` of the owners `$2`. The column `owner` is never null.
const FIND: &str =
    "select media_type, data from images where sha256 = $1 and ($2::text[] is null or owner = any($2)) limit 1";

impl Store {
    /// Returns a recorded image of a run, by its SHA-256 in hexadecimal. The caller must have checked that the client may
    /// read the run.
    ///
    /// # Errors
    /// The database failed.
    pub async fn run_image(&self, run_id: RunId, sha256: &str) -> Result<Option<ImageFile>, Error> {
        let Some(hash) = hash_from_hex(sha256) else { return Ok(None) };
        let found: Option<(String, Vec<u8>)> = sqlx::query_as(
            "select i.media_type, i.data from run_images r join images i on i.owner = r.owner and i.sha256 = r.sha256
            where r.run_id = $1 and r.sha256 = $2",
        )
        .bind(run_id.0)
        .bind(hash)
        .fetch_optional(&self.inner.pool)
        .await?;
        Ok(found.map(|found| image_file(sha256, found)))
    }

    /// Returns a recorded image of any run in the scope.
    ///
    /// # Errors
    /// The database failed.
    pub async fn image(&self, scope: &Scope, sha256: &str) -> Result<Option<ImageFile>, Error> {
        let Some(hash) = hash_from_hex(sha256) else { return Ok(None) };
        let found: Option<(String, Vec<u8>)> =
            sqlx::query_as(FIND).bind(hash).bind(owners(scope)).fetch_optional(&self.inner.pool).await?;
        Ok(found.map(|found| image_file(sha256, found)))
    }
}

fn image_file(sha256: &str, (media_type, data): (String, Vec<u8>)) -> ImageFile {
    ImageFile { sha256: sha256.to_owned(), media_type, data: data.into() }
}

/// Stores the images of runs that begin. Existing files are locked, in the order in which every transaction locks them, so
/// that none is removed meanwhile.
pub(super) async fn insert(connection: &mut PgConnection, starts: &[&RunStart]) -> Result<(), sqlx::Error> {
    let mut files: BTreeMap<(String, Vec<u8>), &ImageFile> = BTreeMap::new();
    let mut references: Vec<(Uuid, String, Vec<u8>)> = Vec::new();
    for start in starts {
        let owner = start.owner.as_ref().map_or("", Tenant::as_str);
        for file in &start.images {
            let Some(hash) = hash_from_hex(&file.sha256) else { continue };
            let owner = clean(owner).into_owned();
            files.insert((owner.clone(), hash.clone()), file);
            references.push((start.run_id.0, owner, hash));
        }
    }
    for ((owner, hash), file) in files {
        // The lock keeps the file until this transaction has inserted its reference. Known files are not sent again.
        let known = sqlx::query("select 1 from images where owner = $1 and sha256 = $2 for key share");
        if known.bind(&owner).bind(&hash).fetch_optional(&mut *connection).await?.is_some() {
            continue;
        }
        sqlx::query(
            "insert into images (owner, sha256, media_type, data) values ($1, $2, $3, $4)
            on conflict (owner, sha256) do update set media_type = excluded.media_type",
        )
        .bind(owner)
        .bind(hash)
        .bind(clean(&file.media_type))
        .bind(&*file.data)
        .execute(&mut *connection)
        .await?;
    }
    for (run_id, owner, hash) in references {
        sqlx::query("insert into run_images (run_id, owner, sha256) values ($1, $2, $3) on conflict do nothing")
            .bind(run_id)
            .bind(owner)
            .bind(hash)
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}

/// Removes the images of the runs between two ids, both included, unless other runs refer to them.
pub(super) async fn remove(connection: &mut PgConnection, first: Uuid, last: Uuid) -> Result<(), sqlx::Error> {
    sqlx::query("select remove_images($1, $2)").bind(first).bind(last).execute(connection).await?;
    Ok(())
}

/// Returns the bytes of a SHA-256 in hexadecimal, in lower case.
fn hash_from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes: Option<Vec<u8>> = pairs.iter().map(|[high, low]| Some((digit(*high)? << 4) | digit(*low)?)).collect();
    bytes.filter(|bytes| bytes.len() == 32 && rest.is_empty())
}

#[cfg(test)]
mod tests {
    use super::{FIND, hash_from_hex};
    use crate::events::hex;
    use crate::store::test_store;

    #[tokio::test]
    async fn image_of_a_tenant_is_found_by_the_primary_key() {
        let (_folder, store) = test_store::open().await;
        let mut transaction = store.inner.pool.begin().await.unwrap();
        sqlx::query("set local enable_seqscan = off").execute(&mut *transaction).await.unwrap();
        let find = FIND.replace("$1", "'ab'").replace("$2", "'{a,\"\"}'");
        let mut explain = sqlx::QueryBuilder::new("explain ");
        explain.push(find);
        let plan: Vec<String> = explain.build_query_scalar().fetch_all(&mut *transaction).await.unwrap();
        let plan = plan.join("\n");
        assert!(plan.contains("images_pkey") && plan.contains("(owner = ANY"), "{plan}");
        drop(transaction);
        store.close().await;
    }

    #[test]
    fn hashes_have_64_digits_in_lower_case() {
        let hash: Vec<u8> = (0..32).map(|byte| byte * 7).collect();
        assert_eq!(hash_from_hex(&hex(&hash)).unwrap(), hash);
        for invalid in ["", "ab", &"A".repeat(64), &"g".repeat(64), &"0".repeat(63), &"0".repeat(66)] {
            assert_eq!(hash_from_hex(invalid), None, "{invalid}");
        }
    }
}
