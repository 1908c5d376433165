package microvm

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
)

// store is the folder of templates:
//
//	<hash>/meta.json   what the hash is the hash of
//	<hash>/ram         the guest's memory, sparse
//	<hash>/device      its devices' state
//	<hash>/top.qcow2   what its boot wrote over the guest image
//	<hash>/base        the guest image (a link to it where possible)
//	index/<recipe>     hash of the template that was made by a recipe
//	sums/, empty/      what is quicker to look up than to do again
//	proofs/            what has been tried here and works
//	unused/            since when a template has been of no use here
//	.new-*             templates in the making
//
// A template's folder appears whole, by renaming, and never changes.
type store struct{ dir string }

// meta describes a template. The hash of its JSON is the template's name.
type meta struct {
	Version  int    `json:"version"`
	Recipe   string `json:"recipe"`   // what it was made by; two boots of one recipe differ
	CPUClass string `json:"cpuClass"` // what it runs on
	VCPU     int    `json:"vcpu"`
	Disk     int64  `json:"disk"` // size of the guest's disk, bytes
	RAM      part   `json:"ram"`
	Device   part   `json:"device"`
	Top      part   `json:"top"`
	Base     part   `json:"base"`
}

const metaVersion = 1

// contents are the files of a template in the order of the wire: the guest
// image comes last, since the receiver often has it.
func (m meta) contents() []content {
	return []content{{"device", m.Device}, {"top.qcow2", m.Top}, {"ram", m.RAM}, {"base", m.Base}}
}

type content struct {
	name string
	part part
}

var validHash = regexp.MustCompile(`^[0-9a-f]{64}$`)

func (s store) path(hash, name string) string { return filepath.Join(s.dir, hash, name) }

// read gives a template's description; its hash is checked, its files are not.
func (s store) read(hash string) (m meta, err error) {
	if !validHash.MatchString(hash) {
		return m, fmt.Errorf("%q is not the hash of a template", hash)
	}
	data, err := os.ReadFile(s.path(hash, "meta.json"))
	if err != nil {
		return m, err
	}
	return parseMeta(data, hash)
}

func parseMeta(data []byte, hash string) (m meta, err error) {
	if got := hashOf(data); got != hash {
		return m, fmt.Errorf("description has the hash %.12s, want %.12s", got, hash)
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return m, fmt.Errorf("description: %w", err)
	}
	if m.Version != metaVersion {
		return m, fmt.Errorf("description of version %d, want %d", m.Version, metaVersion)
	}
	for _, c := range m.contents() {
		if c.part.Size < 0 || c.part.Size > 1<<46 || !validHash.MatchString(c.part.Hash) {
			return m, fmt.Errorf("description of %s: %d bytes, hash %q", c.name, c.part.Size, c.part.Hash)
		}
	}
	return m, nil
}

// isFor says whether a template is for a CPU class.
func (m meta) isFor(class string) error {
	if m.CPUClass != class {
		return fmt.Errorf("it is for %q, this host has %q", m.CPUClass, class)
	}
	return nil
}

func hashOf(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// has says whether a template is here with all files in their sizes; their
// content is checked when it is loaded.
func (s store) has(hash string) bool {
	m, err := s.read(hash)
	if err != nil {
		return false
	}
	for _, c := range m.contents() {
		if info, err := os.Stat(s.path(hash, c.name)); err != nil || info.Size() != c.part.Size {
			return false
		}
	}
	return true
}

// begin makes a folder for a template in the making.
func (s store) begin() (string, error) {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return "", err
	}
	return os.MkdirTemp(s.dir, ".new-")
}

// commit gives the folder of a finished template its name. A template that is
// here already stays: it is the same.
func (s store) commit(dir string, m meta) (hash string, err error) {
	data, err := json.Marshal(m)
	if err != nil {
		return "", err
	}
	hash = hashOf(data)
	if err := os.WriteFile(filepath.Join(dir, "meta.json"), data, 0o600); err != nil {
		return "", err
	}
	if !s.has(hash) {
		if err := os.RemoveAll(filepath.Join(s.dir, hash)); err != nil { // damaged
			return "", err
		}
		if err := syncAll(dir); err != nil {
			return "", err
		}
		if err := os.Rename(dir, filepath.Join(s.dir, hash)); err != nil && !s.has(hash) { // not even another Driver's
			return "", err
		}
		// A session that pauses on it must find it after a power failure.
		if err := syncFolder(s.dir); err != nil {
			return "", err
		}
	}
	return hash, s.setIndex(m.Recipe, hash)
}

// syncAll syncs the files of a folder.
func syncAll(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

// syncFolder makes the names in a folder safe. A variable, so that a test sees when.
var syncFolder = func(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// index gives the template that was made by a recipe, "" when there is none.
func (s store) index(recipe string) string {
	data, err := os.ReadFile(filepath.Join(s.dir, "index", recipe))
	if hash := strings.TrimSpace(string(data)); err == nil && s.has(hash) {
		return hash
	}
	return ""
}

func (s store) setIndex(recipe, hash string) error {
	if !validHash.MatchString(recipe) {
		return fmt.Errorf("recipe %q is not a hash", recipe)
	}
	return s.put("index", recipe, hash)
}

// put writes a small file whole.
func (s store) put(folder, name, text string) error {
	dir := filepath.Join(s.dir, folder)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	half := filepath.Join(dir, newID()+".tmp")
	if err := os.WriteFile(half, []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(half, filepath.Join(dir, name))
}

// sum names the content of a large file that hardly ever changes: read once,
// and again when its inode, size or time of change is another.
func (s store) sum(path string) (part, error) {
	f, err := os.Open(path)
	if err != nil {
		return part{}, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return part{}, err
	}
	name := fmt.Sprintf("%d-%d-%d-%d.%09d", st.Dev, st.Ino, st.Size, st.Mtim.Sec, st.Mtim.Nsec)
	if data, err := os.ReadFile(filepath.Join(s.dir, "sums", name)); err == nil && validHash.Match(data) {
		return part{st.Size, string(data)}, nil
	}
	p, err := partOf(f)
	if err != nil {
		return part{}, fmt.Errorf("read %s: %w", path, err)
	}
	return p, s.put("sums", name, p.Hash)
}

// link puts a file into a folder: as a second name of it, or as a copy where
// the file system is another.
func link(from, to string) error {
	err := os.Link(from, to)
	if err == nil || errors.Is(err, fs.ErrExist) {
		return err
	}
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o400)
	if err != nil {
		return err
	}
	_, err = copyBlocks(dst, src)
	return errors.Join(err, dst.Close())
}

// sweep removes what a crash in the middle of a build left.
func (s store) sweep() error {
	half, err := filepath.Glob(filepath.Join(globQuote(s.dir), ".new-*"))
	errs := []error{err}
	for _, dir := range half {
		errs = append(errs, os.RemoveAll(dir))
	}
	return errors.Join(errs...)
}

// globQuote takes the meaning from a path's pattern characters.
func globQuote(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

// send writes a template as one stream: a line with its description, then its
// files.
func (s store) send(w io.Writer, hash string) error {
	m, err := s.read(hash)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(s.path(hash, "meta.json"))
	if err != nil {
		return err
	}
	if _, err := w.Write(append(data, '\n')); err != nil {
		return err
	}
	for _, c := range m.contents() {
		f, err := os.Open(s.path(hash, c.name))
		if err != nil {
			return err
		}
		err = errors.Join(sendBlocks(w, f), f.Close())
		if err != nil {
			return fmt.Errorf("send %s: %w", c.name, err)
		}
	}
	return nil
}
