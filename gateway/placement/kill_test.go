package placement

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/session"
)

// victim makes sessions, ends every other one, and prints each id once the
// record has answered, until it is killed.
func victim(home string) {
	r, err := Open(config(home))
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	ctx := context.Background()
	if err := r.WaitLeader(ctx); err != nil {
		os.Exit(1)
	}
	_ = r.SetPlans(ctx, []Plan{{Name: "Wide", ConcurrentSessions: 1 << 20, MaxTimeoutSeconds: 900}})
	_, _ = r.PutKey(ctx, Project{ID: "p", Plan: "Wide"}, Key{Hash: "h"})
	for i := 0; ; i++ {
		id := fmt.Sprintf("%d-%d", os.Getpid(), i)
		if _, _, err := r.CreateSession(ctx, draft(id, "p", epoch), ""); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		fmt.Println("made", id)
		if i%2 == 1 {
			if _, _, err := r.EndSession(ctx, id, 1, epoch, session.Released, ""); err != nil {
				os.Exit(1)
			}
			fmt.Println("ended", id)
		}
		if i%100 == 99 {
			_ = r.raft.Snapshot().Error()
		}
	}
}

// TestKill9LosesNothingThatWasAnswered kills a gateway in full work, three
// times over on one home, and finds every answer in the record.
func TestKill9LosesNothingThatWasAnswered(t *testing.T) {
	home := t.TempDir()
	want := map[string]session.Status{}
	for life := range 3 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "BERTH_TEST_VICTIM="+home)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		timer := time.AfterFunc(3*time.Minute, func() { _ = cmd.Process.Kill() })
		lines := bufio.NewScanner(out)
		for n := 0; lines.Scan(); n++ {
			var verb, id string
			if _, err := fmt.Sscan(lines.Text(), &verb, &id); err != nil || verb == "error" {
				t.Fatalf("the gateway said %q", lines.Text())
			}
			want[id] = map[string]session.Status{"made": session.Running, "ended": session.Completed}[verb]
			if n == 150+70*life {
				_ = cmd.Process.Kill() // SIGKILL; what it printed before is read on
			}
		}
		_ = cmd.Wait()
		timer.Stop()
	}
	r, err := Open(config(home))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := r.WaitLeader(ctx); err != nil {
		t.Fatal(err)
	}
	got := ids(r.View())
	lost := 0
	for id, status := range want {
		// The last "ended" may be in the record with its answer never read.
		if got[id] != status && !(status == session.Running && got[id] == session.Completed) {
			lost++
			t.Errorf("%s is %q, answered %q", id, got[id], status)
		}
	}
	if extra := len(got) - len(want); extra > 3 {
		t.Errorf("%d sessions nobody was told of: at most one a kill", extra)
	}
	if len(want) < 400 {
		t.Errorf("only %d sessions were made: this proves little", len(want))
	}
	t.Logf("%d answers, %d lost", len(want), lost)
}
