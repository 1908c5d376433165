package snapshot

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"
)

// pack is what a manifest's header says of a pack.
type pack struct {
	Name string `json:"name"` // hex
	Size int64  `json:"size"` // bytes of the file
	Sum  []byte `json:"sum"`  // SHA-256 of the file
}

// header is the part of a manifest that needs no key.
type header struct {
	ID        string    `json:"id"`
	SessionID string    `json:"session"`
	Created   time.Time `json:"created"`
	Memory    bool      `json:"memory"`
	Driver    string    `json:"driver,omitempty"`
	CPUClass  string    `json:"cpuClass,omitempty"`
	Template  string    `json:"template,omitempty"`
	Pages     int64     `json:"pages,omitempty"`
	Bytes     int64     `json:"bytes"` // of the packs that came with this snapshot
	Packs     []pack    `json:"packs"` // all that it refers to
	Salt      []byte    `json:"salt"`  // of the contents' key
}

// contents is the part of a manifest that is sealed.
type contents struct {
	Slots    []slot  `json:"slots,omitempty"`
	Table    string  `json:"table,omitempty"`
	Device   string  `json:"device,omitempty"`
	Layers   []layer `json:"layers,omitempty"`
	Portable string  `json:"portable,omitempty"`
}

// slot is a pack of pages as the table names it: by its place in the list.
// Two slots may name one pack.
type slot struct {
	Pack   string `json:"pack,omitempty"` // none: no page of this snapshot names the slot
	Stored uint64 `json:"stored"`         // pages in the pack, needed or not
}

type layer struct {
	Name string `json:"name"`
	Size int64  `json:"size"`
	Pack string `json:"pack"`
}

// encodeManifest seals a manifest.
func encodeManifest(key Key, h header, c contents) ([]byte, error) {
	h.Salt = make([]byte, nameSize)
	if _, err := rand.Read(h.Salt); err != nil {
		return nil, err
	}
	open, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}
	closed, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	if len(open) > maxHeader || len(closed)+tagSize > maxHeader {
		return nil, fmt.Errorf("manifest of %d packs is too large", len(h.Packs))
	}
	aead, err := derive(key, h.Salt, manifestInfo(h))
	if err != nil {
		return nil, err
	}
	b := binary.BigEndian.AppendUint16([]byte(manifestMagic), version)
	b = binary.BigEndian.AppendUint32(b, uint32(len(open)))
	b = append(b, open...)
	sealed := aead.Seal(nil, make([]byte, aead.NonceSize()), closed, b)
	b = binary.BigEndian.AppendUint32(b, uint32(len(sealed)))
	b = append(b, sealed...)
	sum := sha256.Sum256(b)
	return append(b, sum[:]...), nil
}

func manifestInfo(h header) string { return "manifest\x00" + h.SessionID + "\x00" + h.ID }

// parsed is a manifest whose checksum is right; its contents are still sealed.
type parsed struct {
	header
	raw    []byte // the whole manifest
	before []byte // what the seal covers beside the contents
	sealed []byte
}

// parseManifest reads what needs no key.
func parseManifest(raw []byte) (parsed, error) {
	const first = len(manifestMagic) + 2 + 4
	switch {
	case len(raw) > maxManifest:
		return parsed{}, refuse(Damaged, "manifest of %d bytes", len(raw))
	case len(raw) < first:
		return parsed{}, refuse(Truncated, "manifest of %d bytes", len(raw))
	case string(raw[:len(manifestMagic)]) != manifestMagic:
		return parsed{}, refuse(Damaged, "no manifest")
	}
	if v := binary.BigEndian.Uint16(raw[len(manifestMagic):]); v != version {
		return parsed{}, refuse(Version, "manifest of version %d, this host reads %d", v, version)
	}
	p := parsed{raw: raw}
	rest := raw[len(manifestMagic)+2:]
	open, rest, ok := cut(rest)
	if !ok {
		return parsed{}, refuse(Truncated, "manifest ends in its header")
	}
	p.before = raw[:first+len(open)]
	if p.sealed, rest, ok = cut(rest); !ok || len(rest) != sha256.Size {
		return parsed{}, refuse(Truncated, "manifest ends in its contents")
	}
	if sum := sha256.Sum256(raw[:len(raw)-sha256.Size]); !bytes.Equal(sum[:], rest) {
		return parsed{}, refuse(Damaged, "checksum of the manifest is wrong")
	}
	if err := json.Unmarshal(open, &p.header); err != nil {
		return parsed{}, refuse(Damaged, "header of the manifest: %v", err)
	}
	return p, p.header.check()
}

// cut takes a length and so many bytes off b.
func cut(b []byte) (part, rest []byte, ok bool) {
	if len(b) < 4 {
		return nil, nil, false
	}
	n := binary.BigEndian.Uint32(b)
	if b = b[4:]; uint64(n) > uint64(len(b)) {
		return nil, nil, false
	}
	return b[:n], b[n:], true
}

// check refuses headers that no writer makes; names become file names.
func (h header) check() error {
	for what, id := range map[string]string{"snapshot": h.ID, "session": h.SessionID} {
		if err := checkID(what, id); err != nil {
			return refuse(Damaged, "header of the manifest: %v", err)
		}
	}
	seen := map[string]bool{}
	for _, p := range h.Packs {
		if _, err := packName(p.Name); err != nil || seen[p.Name] || p.Size < packHeader || len(p.Sum) != sha256.Size {
			return refuse(Damaged, "header of the manifest: pack %q of %d bytes", p.Name, p.Size)
		}
		seen[p.Name] = true
	}
	return nil
}

// packName reads a pack's name as it is in manifests and file names.
func packName(text string) (name [nameSize]byte, err error) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != nameSize || hex.EncodeToString(b) != text {
		return name, fmt.Errorf("pack name %q", text)
	}
	return [nameSize]byte(b), nil
}

// is refuses a manifest of another snapshot or session.
func (p parsed) is(r Ref) error {
	if p.ID != r.ID || p.SessionID != r.SessionID {
		return refuse(Foreign, "snapshot %s of session %s is that of %s", r.ID, r.SessionID, p.ID)
	}
	return nil
}

// open unseals the contents.
func (p parsed) open(key Key) (contents, error) {
	var c contents
	aead, err := derive(key, p.Salt, manifestInfo(p.header))
	if err != nil {
		return c, err
	}
	plain, err := aead.Open(nil, make([]byte, aead.NonceSize()), p.sealed, p.before)
	if err != nil {
		return c, refuse(Damaged, "manifest was altered or is sealed with another key")
	}
	if err := json.Unmarshal(plain, &c); err != nil {
		return c, refuse(Damaged, "contents of the manifest: %v", err)
	}
	return c, nil
}
