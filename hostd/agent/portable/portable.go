// Package portable is the stream that carries a session's state from one
// machine to another when no memory is captured.
//
// The stream is a tar archive. Its entries, in this order:
//
//	state            JSON: version and state, at most MaxState bytes
//	FOLDER/...       files, directories, links; parents before children
//	end              JSON: how many entries came before, so that a cut shows
//
// A sparse file has the PAX record BERTH.sparse "SIZE OFFSET LENGTH OFFSET
// LENGTH ...": its entry holds only the data. Devices, sockets and named pipes
// are left out. The reader trusts nothing: names stay inside their folder,
// links are made as such and never followed out of it, sizes are bounded by
// the disk.
package portable

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Version is of the stream's format; the reader takes no other.
const Version = 1

// MaxState bounds the JSON part, bytes. It holds cookies and the storage of
// open tabs (Chrome allows 10 MiB an origin).
const MaxState = 256 << 20

const (
	stateEntry   = "state"
	endEntry     = "end"
	sparseRecord = "BERTH.sparse"
)

// ErrFormat is of a stream that is not one of ours, damaged or cut.
var ErrFormat = errors.New("not a whole portable state")

func malformed(format string, args ...any) error {
	return fmt.Errorf("portable: %w: %s", ErrFormat, fmt.Sprintf(format, args...))
}

type head struct {
	Version int             `json:"version"`
	State   json.RawMessage `json:"state"`
}

type tail struct {
	Entries int `json:"entries"`
}

// Writer writes a stream: NewWriter, Folder for each folder, Close.
type Writer struct {
	Skip func(name string) bool // if set, says which names are left out, wherever they are

	tar     *tar.Writer
	buf     []byte
	entries int
}

// NewWriter begins a stream with its state.
func NewWriter(w io.Writer, state any) (*Writer, error) {
	out := &Writer{tar: tar.NewWriter(w), buf: make([]byte, 256<<10)}
	raw, err := json.Marshal(state)
	if err != nil {
		return nil, fmt.Errorf("portable: %w", err)
	}
	if len(raw) > MaxState/2 {
		return nil, fmt.Errorf("portable: cookies and storage of open pages take %d bytes, more than a portable capture holds", len(raw))
	}
	if err := out.json(stateEntry, head{Version, raw}); err != nil {
		return nil, err
	}
	return out, nil
}

func (w *Writer) json(name string, v any) error {
	raw, err := json.Marshal(v)
	if err == nil {
		err = w.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(raw)), Mode: 0o600})
	}
	if err == nil {
		_, err = w.tar.Write(raw)
	}
	if err != nil {
		return fmt.Errorf("portable: %s: %w", name, err)
	}
	return nil
}

// Close ends the stream. One that is not closed is refused by Read.
func (w *Writer) Close() error {
	if err := w.json(endEntry, tail{w.entries}); err != nil {
		return err
	}
	if err := w.tar.Close(); err != nil {
		return fmt.Errorf("portable: %w", err)
	}
	return nil
}

// Read reads a stream: state is called once, first, with the state's JSON and
// gives the folders to lay files into. After an error some may have been laid.
func Read(r io.Reader, state func(json.RawMessage) (map[string]*Folder, error)) error {
	in := &reader{tar: tar.NewReader(r), buf: make([]byte, 256<<10)}
	h, err := in.next()
	if err != nil {
		return err
	}
	var first head
	if err := in.json(h, stateEntry, MaxState, &first); err != nil {
		return err
	}
	if first.Version != Version {
		return malformed("version %d, this agent reads %d", first.Version, Version)
	}
	folders, err := state(first.State)
	if err != nil {
		return err
	}
	for entries := 0; ; entries++ {
		if h, err = in.next(); err != nil {
			return err
		}
		if h.Name == endEntry {
			if err := in.end(h, entries); err != nil {
				return err
			}
			break
		}
		if err := in.lay(h, folders); err != nil {
			return err
		}
	}
	return in.finish()
}

type reader struct {
	tar  *tar.Reader
	buf  []byte
	dirs []dirTime
}

func (r *reader) next() (*tar.Header, error) {
	h, err := r.tar.Next()
	if err == io.EOF {
		return nil, malformed("it ends early")
	}
	if err != nil {
		return nil, malformed("%v", err)
	}
	return h, nil
}

func (r *reader) json(h *tar.Header, name string, limit int64, v any) error {
	if h.Name != name || h.Typeflag != tar.TypeReg {
		return malformed("%q in the place of %q", h.Name, name)
	}
	if h.Size > limit {
		return malformed("%s of %d bytes", name, h.Size)
	}
	if err := json.NewDecoder(r.tar).Decode(v); err != nil {
		return malformed("%s: %v", name, err)
	}
	return nil
}

func (r *reader) end(h *tar.Header, entries int) error {
	var t tail
	if err := r.json(h, endEntry, 1<<10, &t); err != nil {
		return err
	}
	if t.Entries != entries {
		return malformed("%d entries, %d were written", entries, t.Entries)
	}
	if _, err := r.tar.Next(); err != io.EOF {
		return malformed("something follows its end")
	}
	return nil
}
