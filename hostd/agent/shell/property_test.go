package shell

import (
	"bytes"
	"encoding/json"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	events "github.com/berth-dev/berth/shared/event"
)

// TestHalvesProperty: what is kept is the first and last half of whatever was
// written, however it was cut into writes.
func TestHalvesProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := &halves{limit: 2 * rapid.IntRange(4, 40).Draw(t, "half")}
		var all []byte
		for _, p := range rapid.SliceOf(rapid.SliceOfN(rapid.ByteRange('a', 'z'), 0, 50)).Draw(t, "writes") {
			all = append(all, p...)
			if n, err := h.Write(p); n != len(p) || err != nil {
				t.Fatalf("Write: %d, %v", n, err)
			}
		}
		want := all
		if len(all) > h.limit {
			want = append(bytes.Clone(all[:h.limit/2]), all[len(all)-h.limit/2:]...)
		}
		if h.text() != string(want) || h.lost != (len(all) > h.limit) {
			t.Fatalf("%q (lost %v), want %q", h.text(), h.lost, want)
		}
	})
}

// TestHalvesCutWholeCharacters: a cut never adds broken characters.
func TestHalvesCutWholeCharacters(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := &halves{limit: 2 * rapid.IntRange(4, 40).Draw(t, "half")}
		_, _ = h.Write([]byte(rapid.String().Draw(t, "text")))
		if !utf8.ValidString(h.text()) {
			t.Fatalf("%q", h.text())
		}
	})
}

// FuzzSplit: the lines of a stream together are what one line would have been,
// wherever the bytes were cut, and no line ends inside a character that the
// next completes.
func FuzzSplit(f *testing.F) {
	f.Add([]byte("aé€😀\xff\xe2\x82"), uint8(1))
	f.Add([]byte("\xf0\x9f\x98\xf0\x9f\x98\x80"), uint8(3))
	f.Fuzz(func(t *testing.T, text []byte, step uint8) {
		w := httptest.NewRecorder()
		o := &side{s: newStream(w), name: "stdout"}
		for rest := text; len(rest) > 0; {
			n := min(int(step)+1, len(rest))
			_, _ = o.Write(rest[:n])
			if len(o.held) > 3 {
				t.Fatalf("holds %d bytes back", len(o.held))
			}
			rest = rest[n:]
		}
		o.end()
		var got strings.Builder
		for d := json.NewDecoder(w.Body); d.More(); {
			var l line
			if err := d.Decode(&l); err != nil {
				t.Fatal(err)
			}
			got.WriteString(l.Data)
		}
		whole, _ := json.Marshal(string(text))
		var want string
		_ = json.Unmarshal(whole, &want)
		if got.String() != want {
			t.Fatalf("%q, want %q", got.String(), want)
		}
	})
}

// FuzzQuote: bash reads back exactly what was quoted.
func FuzzQuote(f *testing.F) {
	for _, s := range []string{"", "'", `\'`, "$x `y` !1", "a\nb", "\xff\xfe", "'''"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if strings.ContainsRune(s, 0) {
			return
		}
		out, err := exec.Command("bash", "-c", "printf %s "+quote(s)).Output()
		if err != nil || string(out) != s {
			t.Fatalf("%q came back as %q, %v", s, out, err)
		}
	})
}

// TestEchoProperty: any text survives the way through a persistent shell, as
// part of the command, as a variable, and as output.
func TestEchoProperty(t *testing.T) {
	s := newShells(t)
	rapid.Check(t, func(rt *rapid.T) {
		text := strings.ReplaceAll(rapid.String().Draw(rt, "text"), "\x00", "")
		got := run(t, s, Command{Text: "printf %s " + quote(text) + `"$V"`, Shell: Default, Env: map[string]string{"V": text}})
		if got.out != text+text {
			rt.Fatalf("%q came back as %q", text, got.out)
		}
	})
}

// FuzzStat: whatever a process calls itself, its numbers are read right.
func FuzzStat(f *testing.F) {
	f.Add("bash")
	f.Add(") R 1 (")
	f.Add("a b\n")
	f.Fuzz(func(t *testing.T, name string) {
		text := "12 (" + name + ") S 7 8 9 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 1 2 3"
		p, ok := parseStat(12, []byte(text))
		if !ok || p.ppid != 7 || p.start != 987654 || p.dead {
			t.Fatalf("%+v, %v", p, ok)
		}
		_, _ = parseStat(1, []byte(name)) // must not panic
	})
}

// TestShown: whatever a command holds, its event is small and keeps its end.
func TestShown(t *testing.T) {
	three := 3
	for _, unit := range []string{"a", "\x01", "\n\"", "<", "é", "漢", "😀", "\xff", "\u2028", "\x7f", "ab漢\x02"} {
		c := &Command{Text: strings.Repeat(unit, MaxCommand/len(unit)), Shell: strings.Repeat("s", 64)}
		d := done(c, Outcome{ExitCode: &three})
		shown, _ := json.Marshal(d.Command)
		data, _ := json.Marshal(d)
		if len(shown) > maxShown+2 || len(shown) < maxShown-64 || !strings.HasSuffix(d.Command, "…") || unit != "\xff" && !utf8.ValidString(d.Command) {
			t.Errorf("%q: %d bytes of JSON, ends with %q", unit, len(shown), d.Command[max(0, len(d.Command)-8):])
		}
		e, _ := json.Marshal(events.Event{Type: events.Exec, Text: d.Command, Data: data})
		if len(e) > events.MaxEventBytes/2+1<<10 || !bytes.Contains(e, []byte(`"exitCode":3`)) {
			t.Errorf("%q: an event of %d bytes", unit, len(e))
		}
	}
	if got := cutEncoded("echo é\n", 9); got != "echo é\n" {
		t.Errorf("what fits became %q", got)
	}
	rapid.Check(t, func(rt *rapid.T) {
		s, n := rapid.String().Draw(rt, "s"), rapid.IntRange(3, 60).Draw(rt, "n")
		got := cutEncoded(s, n)
		b, _ := json.Marshal(got)
		if head, cut := strings.CutSuffix(got, "…"); len(b)-2 > n || got != s && !(cut && strings.HasPrefix(s, head)) {
			rt.Errorf("%q cut to %d: %q", s, n, got)
		}
	})
}
