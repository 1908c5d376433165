// Package snapshot keeps the captures of a host's sessions: it turns a stopped
// machine, or an agent's portable stream, into sealed files and back, passes
// them to other hosts without the key, and brings them to the blob store in the
// background.
//
// # Format, version 1
//
// A snapshot is one manifest and the packs that it refers to. A pack is written
// once and never altered; later snapshots of the same session refer to packs of
// earlier ones for what has not changed. All integers are big endian.
//
//	manifest  "BERTHSNP" | version u16 | n u32 | header, n bytes of JSON
//	          | m u32 | sealed contents, m bytes | SHA-256 of all that is before
//	pack      "BERTHPK" | version u8 | kind u8 | 7 zero bytes | name, 16 bytes | chunks
//	chunk     n u32 | AES-256-GCM(zstd(at most 1 MiB and a bit)), n bytes, 16 of them the tag
//
// The header is what a host without the key needs: which session, which packs
// with size and SHA-256. The contents are JSON too: which pack is what.
//
// A pack's name is 16 random bytes. Its key is HKDF-SHA256 of the session's key,
// salt the name, info format, kind and session; so it seals this one file only,
// and a chunk's nonce can be its number (u64), a byte that is 1 in the last chunk
// and 3 zero bytes. The last chunk is empty. With the pack's first 32 bytes as
// additional data no chunk can be altered, swapped, left out, or taken from
// another pack, session or key. The contents of a manifest are sealed the same
// way: random salt, info with session and snapshot, the bytes before as
// additional data.
//
// What the chunks of a pack hold, one after the other:
//
//	pages     each chunk: count u16 | count indexes u64, rising | count pages of 4096 bytes
//	table     a stream of records, one for each page of the snapshot, by rising index:
//	          uvarint(index - previous index; the first: index) | slot u8 | 16 bytes of the page's SHA-256
//	          slot: which of the manifest's page packs holds it; 255: zeros, and no hash follows
//	stream    bytes: device state, a layer of the disk, a portable capture
//
// A reader takes version 1 only; another version is refused with its number.
package snapshot

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"fmt"

	"github.com/berth-dev/berth/hostd/machine"
)

const (
	version = 1

	manifestMagic = "BERTHSNP"
	packMagic     = "BERTHPK"
	exportMagic   = "BERTHSX\x01"

	nameSize   = 16 // bytes of a pack's name; file names are its hex
	packHeader = 32
	tagSize    = 16
	hashSize   = 16

	chunkPages = 256     // in a chunk of a pages pack
	chunkBytes = 1 << 20 // in a chunk of a stream
	maxPlain   = 2 + chunkPages*(8+machine.PageSize)
	maxFrame   = maxPlain + 1024 // what zstd and the tag add to bytes that do not compress

	maxIndex    = 1 << 40 // 4 PiB of guest memory
	maxHeader   = 4 << 20 // bytes of a manifest's parts: some thousand layers
	maxManifest = 2*maxHeader + 64
	zeroSlot    = 255
)

// kind says what a pack holds.
type kind byte

const (
	kindPages  kind = 1
	kindTable  kind = 2
	kindStream kind = 3
)

// Key is a session's key. The store uses it and forgets it.
type Key = [32]byte

// pageHash names a page's content.
type pageHash [hashSize]byte

func hashPage(data []byte) (h pageHash) {
	sum := sha256.Sum256(data)
	copy(h[:], sum[:])
	return h
}

// derive makes the cipher of one pack or manifest.
func derive(key Key, salt []byte, info string) (cipher.AEAD, error) {
	k, err := hkdf.Key(sha256.New, key[:], salt, "berth snapshot 1\x00"+info, 32)
	if err != nil {
		return nil, fmt.Errorf("derive key: %w", err)
	}
	block, err := aes.NewCipher(k)
	if err != nil {
		return nil, fmt.Errorf("derive key: %w", err)
	}
	return cipher.NewGCM(block)
}

// checkID keeps to ids that are safe as names of files and blobs.
func checkID(what, id string) error {
	if id == "" || len(id) > 100 || id[0] == '-' {
		return fmt.Errorf("%s %q: want 1 to 100 letters, digits, '-' or '_'", what, id)
	}
	for _, c := range []byte(id) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && c != '-' && c != '_' {
			return fmt.Errorf("%s %q: want letters, digits, '-' or '_'", what, id)
		}
	}
	return nil
}
