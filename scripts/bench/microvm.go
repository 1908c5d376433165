package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/client"
)

// warm sees to it that both hosts have the template and have used it: the first
// create builds it on one, a move brings it to the other.
func (b *bench) warm(ctx context.Context) error {
	if b.warmed {
		return nil
	}
	s, err := b.stack.create(ctx, "both")
	if err != nil {
		return fmt.Errorf("first create: %w", err)
	}
	for range b.stack.setup.hosts {
		if _, err := b.stack.api.Move(ctx, s.Id, api.MoveSession{}); err != nil {
			return fmt.Errorf("first move: %w", err)
		}
	}
	b.warmed = true
	return b.stack.release(ctx, s.Id)
}

// timing reads what a histogram of all hosts has collected so far.
type timing struct{ sum, count float64 }

func (s *stack) timing(ctx context.Context, name, labels string) (t timing, err error) {
	if t.sum, err = s.metric(ctx, name+"_sum{"+labels+"}"); err == nil {
		t.count, err = s.metric(ctx, name+"_count{"+labels+"}")
	}
	return t, err
}

// since is the mean of what came after an earlier reading, in milliseconds of
// what is in seconds.
func (t timing) since(before timing) float64 {
	return 1000 * (t.sum - before.sum) / max(1, t.count-before.count)
}

// stepsOf collects the means of a histogram's steps over what runs until its
// result is called.
func (s *stack) stepsOf(ctx context.Context, name string, steps ...string) (func() string, error) {
	read := func() (all []timing, err error) {
		for _, step := range steps {
			t, e := s.timing(ctx, name, fmt.Sprintf("step=%q", step))
			all, err = append(all, t), errors.Join(err, e)
		}
		return all, err
	}
	before, err := read()
	return func() string {
		after, err := read()
		if err != nil {
			return err.Error()
		}
		var parts []string
		for i, step := range steps {
			parts = append(parts, fmt.Sprintf("%s %.0f", step, after[i].since(before[i])))
		}
		return strings.Join(parts, ", ") + " ms"
	}, err
}

// firstReply creates a session and takes the time to the first CDP answer.
func (b *bench) firstReply(ctx context.Context, kind string, into *samples) (api.Session, error) {
	began := time.Now()
	s, err := b.stack.create(ctx, kind)
	if err != nil {
		return s, err
	}
	if err := cdpAnswers(ctx, s); err != nil {
		return s, errors.Join(err, b.stack.release(context.WithoutCancel(ctx), s.Id))
	}
	if into != nil {
		into.since(began)
	}
	return s, nil
}

func cdpAnswers(ctx context.Context, s api.Session) error {
	ws, err := openSocket(ctx, *s.ConnectUrl, dialPlain)
	if err != nil {
		return err
	}
	defer ws.close()
	return ws.version()
}

// work does in a session what a client does in a minute: pages, typing,
// scrolling, a command.
func (b *bench) work(ctx context.Context, s api.Session) error {
	ws, err := openSocket(ctx, *s.ConnectUrl, dialPlain)
	if err != nil {
		return err
	}
	defer ws.close()
	_ = ws.conn.SetDeadline(time.Now().Add(5 * time.Minute)) // emulated; a broken one fails the next call
	page, err := ws.attach()
	if err != nil {
		return err
	}
	for i := range 2 {
		url := fmt.Sprintf("data:text/html,<title>%d</title><input id=i><script>for(let i=0;i<60;i++){const p=document.createElement('p');p.textContent='line '+i*%d+' '+Math.random();document.body.append(p)}</script>", i, i+1)
		if err := ws.open(page, url); err != nil {
			return err
		}
		for _, expression := range []string{"i.focus()", "scrollTo(0,9999)", "document.body.innerText.length"} {
			if _, err := ws.call(page, "Runtime.evaluate", `{"expression":"`+expression+`","returnByValue":true}`); err != nil {
				return err
			}
		}
		if _, err := ws.call(page, "Input.insertText", `{"text":"hello"}`); err != nil {
			return err
		}
	}
	_, err = b.stack.api.Exec(ctx, s.Id, api.Exec{Command: "ls -l /usr/bin > listing; wc listing"})
	return err
}

// pausedBytes is what the session's last pause has written, as its event says.
func (s *stack) pausedBytes(ctx context.Context, id string) (float64, error) {
	var bytes float64
	after := uint64(0)
	for {
		page, err := s.api.Events(ctx, id, after, "lifecycle", 1000)
		if err != nil {
			return 0, err
		}
		for _, e := range page.Data {
			var d struct {
				Reason string
				Bytes  float64
			}
			if e.Data != nil && json.Unmarshal(*e.Data, &d) == nil && d.Reason == "paused" {
				bytes = d.Bytes
			}
		}
		if len(page.Data) == 0 {
			break
		}
		after = page.Data[len(page.Data)-1].Seq
	}
	if bytes == 0 {
		return 0, fmt.Errorf("no event of session %s tells what its pause wrote", id)
	}
	return bytes, nil
}

// guestMemory is the size of a machine's memory as its template has it, and how
// much of that is not zeros (zeros are holes); bytes.
func (s *stack) guestMemory() (whole, used float64, err error) {
	found, _ := filepath.Glob(filepath.Join(s.home, "hostd*", "templates", "*", "ram"))
	for _, path := range found {
		var st syscall.Stat_t
		if err := syscall.Stat(path, &st); err != nil {
			return 0, 0, err
		}
		if float64(st.Size) >= whole {
			whole, used = float64(st.Size), float64(st.Blocks*512)
		}
	}
	if whole == 0 {
		return 0, 0, errors.New("no template is there")
	}
	return whole, used, nil
}

// qemus gives the processes of a host's machines.
func (s *stack) qemus(hostd string) []int {
	sum := sha256.Sum256([]byte(filepath.Join(s.home, hostd, "microvms")))
	var pids []int
	for _, pid := range procs(filepath.Join(unified(), "berth", fmt.Sprintf("%x", sum[:4]))) {
		exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)) // it may have ended
		if strings.HasPrefix(filepath.Base(exe), "qemu-system") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// must runs a command in a session's shell.
func (b *bench) must(ctx context.Context, id, command string) error {
	r, err := b.stack.api.Exec(ctx, id, api.Exec{Command: command, TimeoutMs: client.P(300_000)})
	if err == nil && (r.ExitCode == nil || *r.ExitCode != 0) {
		err = fmt.Errorf("%s: %+v", command, r)
	}
	return err
}
