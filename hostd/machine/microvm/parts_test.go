package microvm

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestStaying(t *testing.T) {
	for _, c := range []struct {
		sizes []int64
		want  int
	}{
		{[]int64{10}, 0}, {[]int64{100, 10}, 1}, {[]int64{10, 10}, 0}, {[]int64{1000, 10, 10, 10}, 1},
		{[]int64{1000, 100, 10}, 2}, {[]int64{100, 30, 20}, 0}, {[]int64{0, 0}, 0},
	} {
		if got := staying(c.sizes); got != c.want {
			t.Errorf("of %v %d stay, want %d", c.sizes, got, c.want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		// A session that writes and is captured again and again has few layers.
		var sizes []int64
		for range rapid.IntRange(1, 200).Draw(t, "captures") {
			sizes = append(sizes, rapid.Int64Range(1, 1<<20).Draw(t, "written"))
			stay := staying(sizes)
			var merged int64
			for _, n := range sizes[stay:] {
				merged += n
			}
			sizes = append(sizes[:stay:stay], merged)
		}
		if len(sizes) > 24 {
			t.Fatalf("%d layers: %v", len(sizes), sizes)
		}
	})
}

func TestStateOnDisk(t *testing.T) {
	dir, two := t.TempDir(), 2
	want := state{Pid: 7, Template: "x", Layers: []string{newLayerName(), newLayerName()}, Frozen: true, Merging: &two}
	if err := want.write(dir); err != nil {
		t.Fatal(err)
	}
	got, err := readState(dir)
	if err != nil || got.Pid != 7 || !got.Frozen || len(got.Layers) != 2 || *got.Merging != 2 {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "{}", `{"layers": ["../x"]}`, `{"layers": []}`} {
		if err := os.WriteFile(filepath.Join(dir, stateName), []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if s, err := readState(dir); err == nil {
			t.Errorf("took %s as %+v", bad, s)
		}
	}
}

func TestLayerNames(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		name := newLayerName()
		if !validLayer.MatchString(name) || len(name) > 31 || seen[name] {
			t.Fatalf("name %q", name)
		}
		seen[name] = true
	}
}

func TestCPIO(t *testing.T) {
	var archive bytes.Buffer
	writeCPIO(&archive, cpioFile{"agent", 0o755, []byte("program")}, cpioFile{"agent.args", 0o644, []byte("--kind\x00shell\x00")}, cpioFile{"empty", 0o600, nil})
	if archive.Len()%4 != 0 {
		t.Errorf("%d bytes: the next archive would not begin at a multiple of four", archive.Len())
	}
	if _, err := exec.LookPath("cpio"); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs cpio")
		}
		t.Skip("needs cpio")
	}
	cmd := exec.Command("cpio", "-i", "--quiet")
	cmd.Dir, cmd.Stdin = t.TempDir(), &archive
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cpio: %v: %s", err, out)
	}
	for name, want := range map[string]string{"agent": "program", "agent.args": "--kind\x00shell\x00", "empty": ""} {
		if got, err := os.ReadFile(filepath.Join(cmd.Dir, name)); err != nil || string(got) != want {
			t.Errorf("%s holds %q (%v)", name, got, err)
		}
	}
	if info, err := os.Stat(filepath.Join(cmd.Dir, "agent")); err != nil || info.Mode() != 0o755 {
		t.Errorf("the agent's mode: %v, %v", info.Mode(), err)
	}
}

func TestVirtualisation(t *testing.T) {
	for text, ok := range map[string]bool{
		"processor\t: 0\nflags\t\t: fpu vmx sse\n": true, "flags\t\t: fpu svm\n": true,
		"flags\t\t: fpu vmxfoo\n": false, "processor\t: 0\n": false, "vmx flags\t: svm vmx\n": false,
	} {
		path := filepath.Join(t.TempDir(), "cpuinfo")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := virtualisation(path); (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := pickAccelerator("warp"); err == nil {
		t.Error("took an accelerator that is none")
	}
}

func TestVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "qemu")
	for script, want := range map[string]string{
		"echo 'QEMU emulator version 7.2.22 (Debian 1:7.2)'\necho more": "7.2.22 (Debian 1:7.2)", "echo other 1.0": "", "exit 3": "",
	} {
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		if got, err := versionOf(t.Context(), path); got != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v", script, got, err)
		}
	}
}

// TestOneCommandLine: a boot and a clone give the guest the same devices.
func TestOneCommandLine(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	devices := func(fill func(*command)) string {
		var c command
		fill(&c)
		var of []string
		for i, arg := range c.args {
			if arg == "-device" || arg == "-M" || arg == "-smp" || arg == "-m" || arg == "-cpu" || arg == "-accel" || arg == "-global" {
				of = append(of, arg+" "+c.args[i+1])
			}
		}
		return strings.Join(of, "\n")
	}
	a := accelerator{TCG, 2_100_000}
	boot := devices(func(c *command) {
		c.machine(a, 2, null, 1<<30, true)
		c.console(null)
		c.devices("disk", null)
		c.boot(null, null, "x")
	})
	clone := devices(func(c *command) {
		c.wait(null)
		c.machine(a, 2, null, 1<<30, false)
		c.console(nil)
		c.devices("disk", null)
	})
	if boot != clone || !strings.Contains(boot, "virtio-blk") {
		t.Errorf("a boot has\n%s\na clone\n%s", boot, clone)
	}
}

// Whoever dials a machine does not wait until its disk layers are merged.
func TestFrozenDuringAChange(t *testing.T) {
	m := &vm{}
	m.mu.Lock()
	defer m.mu.Unlock()
	said := make(chan bool, 1)
	go func() { said <- m.Frozen() }()
	select {
	case is := <-said:
		if is {
			t.Error("frozen")
		}
	case <-time.After(5 * time.Second):
		t.Error("no answer while a change is under way")
	}
}

// What a QEMU wrote into its log is not read into memory whole.
func TestLastWordsOfALongLog(t *testing.T) {
	d := &Driver{cfg: Config{Home: t.TempDir()}}
	if err := os.Mkdir(d.dir("a"), 0o700); err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(d.dir("a"), logName)
	if d.lastWords("a") != "" {
		t.Error("words without a log")
	}
	for _, size := range []int64{0, 100, 1 << 28} {
		if err := errors.Join(os.WriteFile(log, nil, 0o600), os.Truncate(log, size)); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(log, os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString("the end\n"); err != nil {
			t.Fatal(err)
		}
		f.Close()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		words := d.lastWords("a")
		runtime.ReadMemStats(&after)
		if !strings.HasSuffix(words, "the end") || after.TotalAlloc-before.TotalAlloc > 1<<20 {
			t.Errorf("of %d bytes: %d words' bytes, %d allocated", size, len(words), after.TotalAlloc-before.TotalAlloc)
		}
	}
}

// An empty image that a power failure left without content is made again.
func TestEmptyImageIsMadeAgain(t *testing.T) {
	qemuImg, err := exec.LookPath("qemu-img")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	s := store{t.TempDir()}
	for range 2 {
		path, err := s.emptyImage(t.Context(), qemuImg, 64<<20)
		if err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(path); err != nil || info.Size() == 0 {
			t.Errorf("%v, %v", info, err)
		}
		if err := os.Truncate(path, 0); err != nil {
			t.Fatal(err)
		}
	}
}

// A template that this host would file under another name than the one asked
// for is refused, and nothing of it stays.
func TestTemplateWithAStrangeDescription(t *testing.T) {
	d := &Driver{store: store{t.TempDir()}, building: make(chan struct{}, 1), cfg: Config{Boot: t.TempDir()}}
	d.building <- struct{}{}
	nothing := part{0, newSum(0).String()}
	plain, err := json.Marshal(meta{Version: metaVersion, Recipe: hashOf(nil), RAM: nothing, Device: nothing, Top: nothing, Base: nothing})
	if err != nil {
		t.Fatal(err)
	}
	ends := bytes.Repeat([]byte{0xff}, 4*8) // of four empty files
	for _, c := range []struct {
		line  string
		taken bool
	}{{string(plain), true}, {`{"more":1,` + string(plain[1:]), false}} {
		hash := hashOf([]byte(c.line))
		err := d.AddTemplate(t.Context(), hash, io.MultiReader(strings.NewReader(c.line+"\n"), bytes.NewReader(ends)))
		if (err == nil) != c.taken || d.HasTemplate(hash) != c.taken {
			t.Errorf("%s: %v, here: %v", c.line, err, d.HasTemplate(hash))
		}
	}
	other := hashOf([]byte("another recipe"))
	if err := d.SetMade(other, hashOf(plain)); err == nil || d.Made(other) != "" {
		t.Errorf("taken for another recipe's: %v, %q", err, d.Made(other))
	}
	if err := d.SetMade(hashOf(nil), hashOf(plain)); err != nil || d.Made(hashOf(nil)) != hashOf(plain) {
		t.Error(err)
	}
	if left, err := filepath.Glob(d.store.dir + "/*/meta.json"); err != nil || len(left) != 1 {
		t.Errorf("%q, %v", left, err)
	}
}

// A machine goes back to its template only where that template can run.
func TestRestorableIsForTheCPUClass(t *testing.T) {
	m := &vm{driver: &Driver{class: "today's"}, template: &template{meta: meta{CPUClass: "today's"}}}
	if err := m.Restorable(); err != nil {
		t.Error(err)
	}
	m.driver.class = "tomorrow's"
	if m.Restorable() == nil {
		t.Error("a machine of another QEMU is restorable")
	}
}
