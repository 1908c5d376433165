package machinetest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
)

// kept starts a machine of a Keeper.
func (r *Rig) kept() machine.Kept {
	r.Helper()
	return r.Start(r.Spec()).(machine.Kept)
}

// must fails the test for an error.
func (r *Rig) must(what string, err error) {
	r.Helper()
	if err != nil {
		r.Fatalf("%s: %v", what, err)
	}
}

// shipped is a capture that has been taken elsewhere: all of it in memory.
type shipped struct {
	driver, class, template string
	pages                   []machine.Page
	device                  []byte
	layers                  []machine.Layer
	sums                    []string     // of the layers
	drop                    func() error // of what the driver has of them
}

// ship copies a capture and checks its form.
func (r *Rig) ship(c machine.Capture) *shipped {
	r.Helper()
	s := &shipped{drop: func() error { return nil }, driver: c.Driver(), class: c.CPUClass(), template: c.Template()}
	next := uint64(0)
	for p, err := range c.Pages() {
		r.must("pages", err)
		if p.Index < next || p.Data != nil && len(p.Data) != machine.PageSize {
			r.Fatalf("page %d after %d has %d bytes", p.Index, next, len(p.Data))
		}
		if p.Data != nil && bytes.Count(p.Data, []byte{0}) == machine.PageSize {
			r.Errorf("page %d is zeros and not recorded as such", p.Index)
		}
		next = p.Index + 1
		s.pages = append(s.pages, machine.Page{Index: p.Index, Data: bytes.Clone(p.Data)})
	}
	device, err := c.Device()
	r.must("device", err)
	s.device = r.drain(device)
	names := map[string]bool{}
	for _, l := range c.Layers() {
		body, err := l.Open()
		r.must("layer", err)
		data := r.drain(body)
		if int64(len(data)) != l.Size || names[l.Name] {
			r.Errorf("layer %s of %d bytes has %d, or its name twice", l.Name, l.Size, len(data))
		}
		names[l.Name] = true
		s.sums = append(s.sums, fmt.Sprintf("%x", sha256.Sum256(data)))
		s.layers = append(s.layers, machine.Layer{Name: l.Name, Size: l.Size,
			Open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }})
	}
	return s
}

func (r *Rig) drain(body io.ReadCloser) []byte {
	r.Helper()
	data, err := io.ReadAll(body)
	r.must("read", errors.Join(err, body.Close()))
	return data
}

func (s *shipped) Driver() string   { return s.driver }
func (s *shipped) CPUClass() string { return s.class }
func (s *shipped) Template() string { return s.template }
func (s *shipped) Device() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(s.device)), nil
}
func (s *shipped) Layers() []machine.Layer { return s.layers }
func (s *shipped) Close() error            { return nil }
func (s *shipped) Pages() iter.Seq2[machine.Page, error] {
	return func(yield func(machine.Page, error) bool) {
		for _, p := range s.pages {
			if !yield(p, nil) {
				return
			}
		}
	}
}

// bytes is what the capture takes.
func (s *shipped) bytes() int64 {
	n := int64(len(s.device))
	for _, p := range s.pages {
		n += int64(len(p.Data))
	}
	for _, l := range s.layers {
		n += l.Size
	}
	return n
}

// take ships what stands still of a machine, freezes it and ships its capture, as
// an operation does.
func (r *Rig) take(m machine.Kept) *shipped {
	r.Helper()
	still, err := m.AddLayer(r.Context(), 0)
	r.must("add layer", err)
	ahead := r.sums(still)
	more, err := m.AddLayer(r.Context(), len(still))
	r.must("add another layer", err)
	if len(more) < len(still) || !maps.Equal(r.sums(more[:len(still)]), ahead) {
		r.Errorf("after another layer %d stand still that were %d, or others", len(more), len(still))
	}
	maps.Copy(ahead, r.sums(more))
	begin := time.Now()
	r.must("freeze", m.Freeze(r.Context()))
	if !m.Frozen() {
		r.Error("not frozen after a freeze")
	}
	c, err := m.Capture(r.Context())
	r.must("capture", err)
	s := r.ship(c)
	r.must("close capture", c.Close())
	if len(s.layers) != len(more)+1 {
		r.Errorf("%d layers were captured, %d stood still", len(s.layers), len(more))
	}
	for i, l := range s.layers[:min(len(more), len(s.layers))] {
		if ahead[l.Name] != s.sums[i] {
			r.Errorf("layer %s was not what it had been before the stop", l.Name)
		}
	}
	r.Logf("captured %d pages, %.1f MB with disk in %v", len(s.pages), float64(s.bytes())/1e6, time.Since(begin).Round(time.Millisecond))
	return s
}

// sums reads layers and gives the sums of their contents, by name.
func (r *Rig) sums(layers []machine.Layer) map[string]string {
	r.Helper()
	all := map[string]string{}
	for _, l := range layers {
		body, err := l.Open()
		r.must("layer", err)
		data := r.drain(body)
		if int64(len(data)) != l.Size {
			r.Errorf("layer %s of %d bytes has %d", l.Name, l.Size, len(data))
		}
		all[l.Name] = fmt.Sprintf("%x", sha256.Sum256(data))
	}
	return all
}

// restore makes a machine of a capture in a fresh slot.
func (r *Rig) restore(d machine.Driver, s machine.Capture) (machine.Kept, error) {
	r.Helper()
	begin := time.Now()
	m, err := d.(machine.Keeper).Restore(r.Context(), r.Spec(), s, Ignore)
	if err == nil {
		r.Logf("restored in %v", time.Since(begin).Round(time.Millisecond))
	}
	return m, err
}

// count starts a counter in the machine, which keeps its number in a file in
// memory. It starts no process: that is slow where instructions are emulated.
func (r *Rig) count(m machine.Machine) {
	r.Helper()
	r.Sh(m, "setsid bash -c 'exec 9<> <(:); for ((i = 1; ; i++)); do echo $i $$ > /run/count; read -t 0.05 -u 9; done' >/dev/null 2>&1 </dev/null &")
	r.Until("it counts", func() bool { return r.Ask(m, "sh", "test -s /run/count").Code == 0 })
}

// counter is the number and the pid of who counts.
func (r *Rig) counter(m machine.Machine) (n, pid int) {
	r.Helper()
	fields := strings.Fields(r.Sh(m, "until read line < /run/count; do :; done; echo $line"))
	if len(fields) != 2 {
		r.Fatalf("the counter's file holds %q", fields)
	}
	n, _ = strconv.Atoi(fields[0])
	pid, _ = strconv.Atoi(fields[1])
	return n, pid
}

// goesOn checks that the same process counts on from where it was.
func (r *Rig) goesOn(m machine.Machine, n, pid int) {
	r.Helper()
	got, who := r.counter(m)
	if got < n || got > n+10_000 || who != pid {
		r.Errorf("the counter of process %d at %d is now one of process %d at %d", pid, n, who, got)
	}
	r.Until("it counts", func() bool { now, _ := r.counter(m); return now > got })
}

// captureRestore: memory, processes, disk and clock of a machine go on in
// another one, and not before it is thawed.
func captureRestore(r *Rig) {
	m := r.kept()
	template, err := r.Driver.(machine.Keeper).Template(r.Context(), m.Handle().Spec)
	r.must("template", err)
	r.count(m)
	r.Sh(m, "echo before > /workspace/note; head -c 3000000 /dev/urandom > /workspace/random; rm -f /usr/share/dict/none")
	sum := r.Sh(m, "sha256sum < /workspace/random")
	n, pid := r.counter(m)
	s := r.take(m)
	if s.template != template || s.driver != r.Driver.Name() || s.class != r.Driver.(machine.Keeper).CPUClass() {
		r.Errorf("the capture is of template %.12s, driver %s, class %q", s.template, s.driver, s.class)
	}
	begin := time.Now()
	if conn, err := m.Dial(r.Context()); err == nil || time.Since(begin) > time.Second {
		r.Errorf("dialled a frozen machine: %v after %v", conn, time.Since(begin))
	}
	r.Stop(m)
	r.badLayers(s)
	for i := range 2 { // a capture can be restored as often as one likes
		from := s
		if i == 1 {
			from = r.ahead(s)
		}
		m2, err := r.restore(r.Driver, from)
		r.must("restore", err)
		r.must("drop layers", from.drop())
		if !m2.Frozen() {
			r.Error("not frozen after a restore")
		}
		r.must("thaw", m2.Thaw(r.Context()))
		r.goesOn(m2, n, pid)
		if got := r.Sh(m2, "cat /workspace/note; sha256sum < /workspace/random"); got != "before\n"+sum {
			r.Errorf("the disk holds %q", got)
		}
		r.Sh(m2, "echo after > /workspace/note; sync; echo 3 > /proc/sys/vm/drop_caches")
		if got := r.Sh(m2, "cat /workspace/note; sha256sum < /workspace/random"); got != "after\n"+sum {
			r.Errorf("the disk holds %q", got)
		}
		r.Stop(m2)
	}
	r.WantNothing()
}

// ahead gives the driver a capture's layers, twice, and the capture without their
// contents.
func (r *Rig) ahead(s *shipped) *shipped {
	r.Helper()
	k := r.Driver.(machine.Keeper)
	first, err := k.AddLayers(r.Context(), s.layers[:1])
	r.must("add a layer", err)
	rest, err := k.AddLayers(r.Context(), s.layers)
	r.must("add layers", errors.Join(err, first()))
	without := *s
	without.layers, without.drop = slices.Clone(s.layers), rest
	for i := range without.layers {
		without.layers[i].Open = func() (io.ReadCloser, error) { return nil, errors.New("it came ahead") }
	}
	return &without
}

// badLayers: layers that are not what they say are not taken.
func (r *Rig) badLayers(s *shipped) {
	r.Helper()
	for what, change := range map[string]func(l *machine.Layer){
		"name":  func(l *machine.Layer) { l.Name = "../" + l.Name },
		"short": func(l *machine.Layer) { l.Size++ },
		"long":  func(l *machine.Layer) { l.Size-- },
		"lost":  func(l *machine.Layer) { l.Open = func() (io.ReadCloser, error) { return nil, errors.New("lost") } },
	} {
		bad := slices.Clone(s.layers)
		change(&bad[len(bad)-1])
		if _, err := r.Driver.(machine.Keeper).AddLayers(r.Context(), bad); err == nil {
			r.Errorf("a layer with a bad %s was taken", what)
		}
	}
}

// captureAborted: a machine whose capture nobody wanted goes on, and what was
// captured keeps its content.
func captureAborted(r *Rig) {
	m := r.kept()
	r.count(m)
	r.Sh(m, "echo one > /workspace/note; sync")
	n, pid := r.counter(m)
	first := r.take(m)
	r.must("freeze again", m.Freeze(r.Context()))
	r.must("thaw", m.Thaw(r.Context()))
	r.must("thaw again", m.Thaw(r.Context()))
	if m.Frozen() {
		r.Error("frozen after a thaw")
	}
	r.goesOn(m, n, pid)
	r.Sh(m, "echo two > /workspace/note; head -c 2000000 /dev/urandom > /workspace/more; sync")
	second := r.take(m)
	for i, l := range first.layers {
		j := slices.IndexFunc(second.layers, func(o machine.Layer) bool { return o.Name == l.Name })
		if j >= 0 && second.sums[j] != first.sums[i] {
			r.Errorf("layer %s has changed under its name", l.Name)
		}
	}
	r.must("thaw", m.Thaw(r.Context()))
	r.Stop(m)
	for want, s := range map[string]*shipped{"one": first, "two": second} {
		m, err := r.restore(r.Driver, s)
		r.must("restore", err)
		r.must("thaw", m.Thaw(r.Context()))
		if got := r.Sh(m, "echo 3 > /proc/sys/vm/drop_caches; cat /workspace/note"); got != want {
			r.Errorf("the note says %q, want %q", got, want)
		}
		r.Stop(m)
	}
	r.WantNothing()
}

// adoptFrozen: hostd restarts between freeze and verdict.
func adoptFrozen(r *Rig) {
	m := r.kept()
	r.count(m)
	n, pid := r.counter(m)
	r.must("freeze", m.Freeze(r.Context()))
	r.Restart()
	m = r.adopted(m)
	if !m.Frozen() {
		r.Fatal("a frozen machine was adopted running")
	}
	s := r.take2(m)
	r.Restart()
	m = r.adopted(m)
	r.must("thaw", m.Thaw(r.Context()))
	r.goesOn(m, n, pid)
	r.Restart()
	if m = r.adopted(m); m.Frozen() {
		r.Error("a running machine was adopted frozen")
	}
	r.goesOn(m, n, pid)
	r.Stop(m)
	// A restored machine nobody has thawed is adopted frozen too.
	m, err := r.restore(r.Driver, s)
	r.must("restore", err)
	r.Restart()
	if m = r.adopted(m); !m.Frozen() {
		r.Fatal("a restored machine was adopted running")
	}
	r.must("thaw", m.Thaw(r.Context()))
	r.goesOn(m, n, pid)
	r.Stop(m)
	r.WantNothing()
}

// take2 ships the capture of a machine that is frozen already.
func (r *Rig) take2(m machine.Kept) *shipped {
	r.Helper()
	c, err := m.Capture(r.Context())
	r.must("capture", err)
	defer c.Close()
	return r.ship(c)
}

func (r *Rig) adopted(m machine.Machine) machine.Kept {
	r.Helper()
	a, err := r.Driver.Adopt(r.Context(), m.Handle())
	r.must("adopt", err)
	return a.(machine.Kept)
}

// restoreRefused: what does not fit is refused, and nothing stays of it.
func restoreRefused(r *Rig) {
	m := r.kept()
	if _, err := m.Capture(r.Context()); err == nil {
		r.Error("captured a running machine")
	}
	good := r.take(m)
	r.Stop(m)
	spoil := func(change func(*shipped)) machine.Capture {
		s := *good
		s.pages, s.layers = slices.Clone(s.pages), slices.Clone(s.layers)
		change(&s)
		return &s
	}
	for name, bad := range map[string]machine.Capture{
		"driver":        spoil(func(s *shipped) { s.driver = "oci" }),
		"class":         spoil(func(s *shipped) { s.class += "x" }),
		"template":      spoil(func(s *shipped) { s.template = strings.Repeat("0", 64) }),
		"no template":   spoil(func(s *shipped) { s.template = "" }),
		"device cut":    spoil(func(s *shipped) { s.device = s.device[:len(s.device)/2] }),
		"device noise":  spoil(func(s *shipped) { s.device = bytes.Repeat([]byte("x"), len(s.device)) }),
		"page outside":  spoil(func(s *shipped) { s.pages = append(s.pages, machine.Page{Index: 1 << 40}) }),
		"pages swapped": spoil(func(s *shipped) { slices.Reverse(s.pages) }),
		"page short":    spoil(func(s *shipped) { s.pages[0].Data = []byte("short") }),
		"layer's name":  spoil(func(s *shipped) { s.layers[0].Name = "../../" + s.layers[0].Name }),
		"layer cut":     spoil(func(s *shipped) { s.layers[0].Size++ }),
		"layer twice":   spoil(func(s *shipped) { s.layers = append(s.layers, s.layers[0]) }),
		"layer broken": spoil(func(s *shipped) {
			s.layers[0].Open = func() (io.ReadCloser, error) { return nil, errors.New("lost") }
		}),
	} {
		if m, err := r.restore(r.Driver, bad); err == nil {
			r.Errorf("%s: restored", name)
			r.Stop(m)
		} else {
			r.Logf("%s: %v", name, err)
		}
		r.WantNothing()
	}
	spec := r.Spec()
	spec.Size.GiB++
	if m, err := r.Driver.(machine.Keeper).Restore(r.Context(), spec, good, Ignore); err == nil {
		r.Error("restored into a machine of another size")
		r.Stop(m)
	}
	r.WantNothing()
}

// templates: what one host has built another takes, whole and unaltered; what
// it has built itself by the same recipe is another template.
func templates(r *Rig) {
	ours, spec := r.Driver.(machine.Keeper), r.Spec()
	hash, err := ours.Template(r.Context(), spec)
	r.must("template", err)
	if again, err := ours.Template(r.Context(), spec); err != nil || again != hash {
		r.Errorf("asked again, the template is %.12s (%v)", again, err)
	}
	home := filepath.Join(filepath.Dir(r.Home), "sibling")
	other, letGo := r.subject.Sibling(r, home, r.Base, r.Layer)
	defer letGo()
	defer func() {
		r.must("sweep", other.Sweep(context.WithoutCancel(r.Context()), func(string) bool { return false }))
	}()
	theirs := other.(machine.Keeper)
	sibling, err := theirs.Template(r.Context(), spec)
	r.must("sibling's template", err)
	if sibling == hash {
		r.Error("two boots gave one template")
	}
	m := r.kept()
	r.count(m)
	n, pid := r.counter(m)
	s := r.take(m)
	if m, err := r.restore(other, s); err == nil {
		r.Error("restored over an independently built sibling")
		r.Stop(m)
	}
	r.badTemplates(ours, theirs, hash)
	stream, err := ours.OpenTemplate(hash)
	r.must("open template", err)
	begin := time.Now()
	r.must("add template", errors.Join(theirs.AddTemplate(r.Context(), hash, stream), stream.Close()))
	r.Logf("template taken over in %v", time.Since(begin).Round(time.Millisecond))
	if !theirs.HasTemplate(hash) {
		r.Error("the added template is not there")
	}
	r.Stop(m)
	m, err = r.restore(other, s)
	r.must("restore on the other host", err)
	r.must("thaw", m.Thaw(r.Context()))
	r.goesOn(m, n, pid)
	r.Stop(m)
	r.WantNothing()
}

// badTemplates: a stream that is not the template is refused and leaves nothing.
func (r *Rig) badTemplates(from, to machine.Keeper, hash string) {
	r.Helper()
	if to.HasTemplate(hash) {
		r.Fatal("the template is there already")
	}
	for name, wrap := range map[string]func(io.Reader) io.Reader{
		"empty":   func(io.Reader) io.Reader { return strings.NewReader("") },
		"cut":     func(in io.Reader) io.Reader { return io.LimitReader(in, 5<<20) },
		"flipped": func(in io.Reader) io.Reader { return &flip{in, 9 << 20} },
		"early":   func(in io.Reader) io.Reader { return &flip{in, 50} },
	} {
		stream, err := from.OpenTemplate(hash)
		r.must("open template", err)
		if err := to.AddTemplate(r.Context(), hash, wrap(stream)); err == nil {
			r.Errorf("%s: the template was taken", name)
		}
		r.must("close", stream.Close())
		if to.HasTemplate(hash) {
			r.Errorf("%s: the template stayed", name)
		}
	}
	if _, err := from.OpenTemplate(strings.Repeat("0", 64)); err == nil {
		r.Error("opened a template that is not there")
	}
}

// flip inverts one byte of a stream.
type flip struct {
	io.Reader
	at int
}

func (f *flip) Read(p []byte) (int, error) {
	n, err := f.Reader.Read(p)
	if f.at >= 0 && f.at < n {
		p[f.at] ^= 1
	}
	f.at -= n
	return n, err
}

// generations: a session that is paused and resumed again and again keeps its
// processes and files and does not grow without bound.
func generations(r *Rig) {
	m := r.kept()
	r.count(m)
	n, pid := r.counter(m)
	var first, last int64
	for i := range 6 {
		r.Sh(m, fmt.Sprintf("echo %d > /workspace/generation; head -c 1000000 /dev/urandom > /workspace/changing; sync", i))
		s := r.take(m)
		if i == 0 {
			first = s.bytes()
		}
		last = s.bytes()
		r.Stop(m)
		next, err := r.restore(r.Driver, s)
		r.must("restore", err)
		m = next
		r.must("thaw", m.Thaw(r.Context()))
		r.goesOn(m, n, pid)
		if got := r.Sh(m, "cat /workspace/generation; stat -c %s /workspace/changing"); got != fmt.Sprintf("%d\n1000000", i) {
			r.Errorf("generation %d has %q", i, got)
		}
	}
	r.Logf("captures: first %d bytes, last %d", first, last)
	if last > 4*first {
		r.Errorf("a capture of %d bytes grew to %d", first, last)
	}
	r.Stop(m)
	r.WantNothing()
}

// filledDisk: a full disk is an error inside, and harms nobody else.
func filledDisk(r *Rig) {
	full, neighbour := r.kept(), r.kept()
	reply := r.Ask(full, "sh", "dd if=/dev/zero of=/workspace/filler bs=4M 2>&1")
	if reply.Code == 0 || !strings.Contains(reply.Text, "No space") {
		r.Errorf("zeros without end onto a disk: %q, code %d", reply.Text, reply.Code)
	}
	if got := r.Sh(full, "rm /workspace/filler; sync; echo alive"); got != "alive" {
		r.Errorf("after that: %q", got)
	}
	r.stillFine(full, neighbour)
}
