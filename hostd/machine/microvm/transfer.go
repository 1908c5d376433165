package microvm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// maxMeta bounds a template's description on the wire.
const maxMeta = 64 << 10

// OpenTemplate gives a template as one stream, for another host. An error of
// its files, as of the reader's going away, ends the stream.
func (d *Driver) OpenTemplate(hash string) (io.ReadCloser, error) {
	if !d.store.has(hash) {
		return nil, fmt.Errorf("open template %.12s: it is not here", hash)
	}
	r, w := io.Pipe()
	go func() {
		buf := bufio.NewWriterSize(w, 1<<20)
		err := d.store.send(buf, hash)
		w.CloseWithError(errors.Join(err, buf.Flush())) // nil is the end
	}()
	return r, nil
}

// AddTemplate takes another host's template in. A stream whose content does not
// have the hash is refused and leaves nothing. The guest image at the stream's
// end is not read where this host has the same.
func (d *Driver) AddTemplate(ctx context.Context, hash string, r io.Reader) error {
	if !validHash.MatchString(hash) {
		return fmt.Errorf("add template: %q is no hash", hash)
	}
	leave, err := d.enter(ctx)
	if err != nil {
		return fmt.Errorf("add template %.12s: %w", hash, err)
	}
	defer leave()
	if d.store.has(hash) {
		return nil
	}
	dir, err := d.store.begin()
	if err != nil {
		return fmt.Errorf("add template %.12s: %w", hash, err)
	}
	defer os.RemoveAll(dir)
	m, err := d.receive(&patient{ctx, bufio.NewReaderSize(r, 1<<20)}, dir, hash)
	if err == nil {
		_, err = d.store.commit(dir, m)
	}
	if err != nil {
		return fmt.Errorf("add template %.12s: %w", hash, err)
	}
	return nil
}

// patient reads until its context ends.
type patient struct {
	ctx context.Context
	*bufio.Reader
}

func (p *patient) Read(b []byte) (int, error) {
	if err := p.ctx.Err(); err != nil {
		return 0, context.Cause(p.ctx)
	}
	return p.Reader.Read(b)
}

func (d *Driver) receive(r *patient, dir, hash string) (meta, error) {
	line, err := r.ReadSlice('\n')
	if err != nil || len(line) > maxMeta {
		return meta{}, fmt.Errorf("no description: %w", err)
	}
	m, err := parseMeta(line[:len(line)-1], hash)
	if err != nil {
		return meta{}, err
	}
	if again, err := json.Marshal(m); err != nil || hashOf(again) != hash { // it would get another name here
		return meta{}, errors.New("description with more in it than this host knows")
	}
	for _, c := range m.contents() {
		to := filepath.Join(dir, c.name)
		if c.name == "base" && d.sameBase(m.Base) {
			if err := link(d.bootFile("disk.ext4"), to); err != nil {
				return meta{}, err
			}
			continue
		}
		f, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o400)
		if err != nil {
			return meta{}, err
		}
		if err := errors.Join(receiveBlocks(f, r, c.part), f.Close()); err != nil {
			return meta{}, fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return m, nil
}

// sameBase says whether this host's guest image is the one of a template.
func (d *Driver) sameBase(want part) bool {
	got, err := d.store.sum(d.bootFile("disk.ext4"))
	return err == nil && got == want
}

func (d *Driver) bootFile(name string) string { return filepath.Join(d.cfg.Boot, name) }

// HasTemplate says whether a template is here, whole.
func (d *Driver) HasTemplate(hash string) bool { return d.store.has(hash) }
