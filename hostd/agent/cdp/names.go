package cdp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"unicode/utf8"
)

// maxDownloadEvent is the largest message of Chrome's that may be a download
// event: a URL (data: URLs are cut by Chrome at 2 MiB) and a file name.
const maxDownloadEvent = 4 << 20

// maxName is the longest file name on Linux, bytes.
const maxName = 255

// names gives files that Chrome stored under a GUID (allowAndName) the names
// their servers suggested, before the client hears that they are complete.
type names struct {
	dir  string
	hide atomic.Bool // download events are for the broker only

	suggested map[string]string // by GUID; fromChrome's alone
}

func newNames(dir string) *names { return &names{dir: dir, suggested: map[string]string{}} }

var downloadEvent = []byte(`.download`)

// event looks at a message of Chrome's: out is what the client gets, unless
// pass is false.
func (n *names) event(msg []byte) (out []byte, pass bool) {
	if !bytes.Contains(msg, downloadEvent) {
		return msg, true
	}
	var e struct {
		Method    string                     `json:"method"`
		Params    map[string]json.RawMessage `json:"params"`
		SessionID string                     `json:"sessionId,omitempty"`
	}
	if json.Unmarshal(msg, &e) != nil {
		return msg, true
	}
	switch e.Method {
	case "Browser.downloadWillBegin":
		n.begin(e.Params)
	case "Browser.downloadProgress":
		if path := n.progress(e.Params); path != "" {
			e.Params["filePath"], _ = json.Marshal(path)
			msg, _ = json.Marshal(e)
		}
	default:
		return msg, true
	}
	return msg, !n.hide.Load()
}

func (n *names) begin(params map[string]json.RawMessage) {
	guid, name := text(params["guid"]), text(params["suggestedFilename"])
	// The GUID becomes a file name: nothing but what Chrome makes may pass.
	if guid != "" && guid == filepath.Base(guid) && guid != "." && guid != ".." {
		n.suggested[guid] = cleanName(name)
	}
}

// progress names a completed file and returns its path, "" when there is
// nothing to name.
func (n *names) progress(params map[string]json.RawMessage) string {
	guid, state := text(params["guid"]), text(params["state"])
	name, known := n.suggested[guid]
	if !known || state == "inProgress" {
		return ""
	}
	delete(n.suggested, guid)
	if state != "completed" {
		return ""
	}
	path, err := giveName(filepath.Join(n.dir, guid), n.dir, name)
	if err != nil {
		return "" // it is not there under its GUID: saved by name, or taken by another client's broker
	}
	return path
}

func text(raw json.RawMessage) string {
	var s string
	_ = json.Unmarshal(raw, &s)
	return s
}

// cleanName makes a server's suggestion one harmless path element.
func cleanName(name string) string {
	name = strings.Map(func(r rune) rune {
		if r == '/' || r == 0 {
			return '_'
		}
		return r
	}, name)
	for len(name) > maxName {
		ext := filepath.Ext(name)
		if len(ext) > 32 {
			ext = ""
		}
		stem := name[:maxName-len(ext)]
		for !utf8.ValidString(stem) && len(stem) > maxName-len(ext)-utf8.UTFMax {
			stem = stem[:len(stem)-1]
		}
		name = stem + ext
	}
	if name == "" || name == "." || name == ".." {
		return "download"
	}
	return name
}

// giveName moves file to name in dir, or to "name (1).ext" and so on when
// that is taken, never over another file.
func giveName(file, dir, name string) (string, error) {
	ext := filepath.Ext(name)
	stem := strings.TrimSuffix(name, ext)
	for i := 0; i < 10_000; i++ {
		to := filepath.Join(dir, name)
		if i > 0 {
			suffix := fmt.Sprintf(" (%d)%s", i, ext)
			to = filepath.Join(dir, stem[:min(len(stem), max(0, maxName-len(suffix)))]+suffix)
		}
		err := os.Link(file, to) // unlike rename, fails when the name is taken
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("name download: %w", err)
		}
		if err := os.Remove(file); err != nil {
			return "", fmt.Errorf("name download: %w", err)
		}
		return to, nil
	}
	return "", fmt.Errorf("name download: %q is taken too often", name)
}
