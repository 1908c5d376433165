package e2e

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/cdpclient"
)

// beside runs something bad in one session and holds that a neighbour answers
// quickly all the while. It gives the bad command's answer.
func beside(t *testing.T, c *testenv.Client, bad api.Session, f testenv.Fields) testenv.Answer {
	t.Helper()
	neighbour := c.Shell()
	done := make(chan testenv.Answer, 1)
	go func() {
		a, err := c.Try(within(t, time.Minute), http.MethodPost, "/v1/sessions/"+bad.Id+"/exec", f)
		if err != nil {
			t.Error(err)
		}
		done <- a
	}()
	for n := 0; ; n++ {
		select {
		case a := <-done:
			if n == 0 {
				t.Error("the neighbour was never asked")
			}
			return a
		default:
		}
		began := time.Now()
		if got := c.Output(neighbour.Id, "echo well; echo x > f; cat f"); got != "well\nx" {
			t.Errorf("the neighbour said %q", got)
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("the neighbour took %s", took)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func TestForkBomb(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	s := c.Shell()
	beside(t, c, s, testenv.Fields{"command": ":(){ :|:& };:; sleep 3", "timeoutMs": 8000, "shell": false})
	// The user's processes have a limit below the machine's, so the agent goes on.
	testenv.Wait(t, 20*time.Second, "the bombed session runs commands again", func() bool {
		a := c.Do(http.MethodPost, "/v1/sessions/"+s.Id+"/exec", testenv.Fields{"command": "echo alive", "shell": false, "timeoutMs": 3000})
		if a.Status == http.StatusConflict {
			t.Fatalf("the bomb ended its session: %s", *c.Get(s.Id).Error)
		}
		return a.Status == http.StatusOK && strings.Contains(string(a.Body), "alive")
	})
	c.Release(s.Id)
}

func TestMemoryHog(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	s := c.Shell()
	c.Output(s.Id, "KEPT=1")
	before := available(t)
	a := beside(t, c, s, testenv.Fields{"command": "python3 -c 'x = [bytearray(1 << 20) for i in range(1 << 20)]'", "shell": false, "timeoutMs": 30000})
	if a.Status != 200 || strings.Contains(string(a.Body), `"exitCode":0`) {
		t.Errorf("a program that wants a terabyte: %d %s", a.Status, a.Body)
	}
	if lost := before - available(t); lost > 2<<20 {
		t.Errorf("the host has %d MiB less", lost>>10)
	}
	if got := c.Output(s.Id, "echo still $KEPT"); got != "still 1" {
		t.Errorf("its own shell after that: %q", got)
	}
}

// available is the host's free memory in KiB.
func available(t *testing.T) (kib int) {
	t.Helper()
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "MemAvailable:")
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		t.Fatal(err)
	}
	return kib
}

func TestFullDisk(t *testing.T) {
	env := testenv.Start(t, testenv.Options{Pool: "shell=1", Hostd: []string{"--disk-gib", "1"}})
	c := env.Client(t, "Scale")
	s := c.Shell()
	a := beside(t, c, s, testenv.Fields{"command": "dd if=/dev/zero of=big bs=1M count=4000 2>&1 | tail -1; df --output=pcent . | tail -1", "timeoutMs": 60000})
	if a.Status != 200 || !strings.Contains(string(a.Body), "100%") {
		t.Errorf("writing 4 GB on a disk of 1 GiB: %d %s", a.Status, a.Body)
	}
	// A full disk is an answer, not a hang, and nothing half-written stays.
	put := c.Do(http.MethodPut, testenv.FilePath(s.Id, "more"), strings.NewReader(strings.Repeat("x", 1<<20)))
	if put.Status < 400 {
		t.Errorf("a file on a full disk: %d %s", put.Status, put.Body)
	}
	if got := c.Output(s.Id, "ls -A | grep -v downloads; rm big; echo ok > ok; cat ok"); got != "big\nok" {
		t.Errorf("after the disk was full: %q", got)
	}
}

func TestMachinesAreApart(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	a, b := c.Shell(), c.Shell()
	c.Output(a.Id, "echo mine > /workspace/x; echo mine > /tmp/x; (sleep 27182 >/dev/null 2>&1 &)")
	if got := c.Exec(b.Id, "cat /workspace/x /tmp/x; pgrep -a sleep").Stdout; got != "" {
		t.Errorf("one session sees of another %q", got)
	}
	if x, y := c.Output(a.Id, "cat /etc/machine-id"), c.Output(b.Id, "cat /etc/machine-id"); x == y || len(x) != 32 {
		t.Errorf("machine ids %q and %q", x, y)
	}
	for _, bad := range []string{"sudo mount -t tmpfs x /mnt", "sudo dmesg", "sudo reboot -f", "sudo mknod /tmp/d b 7 0", "sudo sysctl -w kernel.hostname=x",
		"sudo ip link add x type dummy", "sudo nft list ruleset", "sudo unshare -n true && sudo ip addr add 10.0.0.1/8 dev eth0", "sudo chroot /proc/1/root/.. ls /var/lib/berth",
		"cat /proc/1/environ", "sudo sh -c 'echo 1 > /proc/sys/kernel/panic'", "sudo bash -c 'echo b > /proc/sysrq-trigger'"} {
		if r := c.ExecWith(a.Id, testenv.Fields{"command": bad, "timeoutMs": 5000, "shell": false}); r.ExitCode != nil && *r.ExitCode == 0 {
			t.Errorf("%s worked: %+v", bad, r)
		}
	}
	p := testenv.Process{}
	env := stack.Start(t)
	if p = env.FindProcess(t, "sleep", "27182"); p.Slot == "" {
		t.Error("no slot")
	}
}

// Chrome's death is an event and a new Chrome, not the session's end.
func TestChromeKilled(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	s := c.Create(testenv.Fields{"shell": true, "viewport": testenv.Fields{"width": 640, "height": 480}})
	cdp, p := testenv.FirstPage(t, *s.ConnectUrl)
	if err := p.Evaluate(within(t, 10*time.Second), "1", nil); err != nil {
		t.Fatal(err)
	}
	if r := c.Exec(s.Id, "sudo pkill -9 -f -- --type=gpu-process; sudo pkill -9 -o -f '[c]hrom'; sleep 0.2; echo"); r.ExitCode == nil {
		t.Fatalf("%+v", r)
	}
	select {
	case <-cdp.Done():
	case <-time.After(10 * time.Second):
		t.Error("the client of a dead Chrome was not told")
	}
	ctx := within(t, 40*time.Second)
	again := chromeAgain(ctx, t, s)
	defer again.Close()
	fresh, err := again.FirstPage(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var size []int
	if err := fresh.Evaluate(ctx, "[innerWidth, innerHeight]", &size); err != nil || len(size) != 2 || size[0] != 640 || size[1] != 480 {
		t.Errorf("the new page is %v (%v), want the session's viewport", size, err)
	}
	told := false
	for _, e := range c.Events(s.Id) {
		told = told || strings.Contains(e.Text, "Chrome") && (e.Type == "error" || e.Type == "lifecycle")
	}
	if !told {
		t.Errorf("no event tells of it: %+v", c.Events(s.Id))
	}
	if got := c.Get(s.Id); got.Status != "RUNNING" {
		t.Errorf("the session is %s", got.Status)
	}
}

// chromeAgain waits for the Chrome that follows one that was killed.
func chromeAgain(ctx context.Context, t *testing.T, s api.Session) (again *cdpclient.Client) {
	t.Helper()
	testenv.Wait(t, 30*time.Second, "Chrome answers again", func() bool {
		short, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		var err error
		if again, err = cdpclient.Dial(short, *s.ConnectUrl); err != nil {
			return false
		}
		return again.Call(short, "", "Browser.getVersion", nil, nil) == nil
	})
	return again
}

// The agent's death is the machine's: ERROR with a sentence, and all freed.
func TestAgentKilled(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Free")
	s := c.Create(testenv.Fields{"shell": true})
	cdp, _ := testenv.FirstPage(t, *s.ConnectUrl)
	c.Output(s.Id, "(sleep 16180 >/dev/null 2>&1 &)")
	p := env.FindProcess(t, "sleep", "16180")
	env.KillProcess(t, env.Agent(t, p))
	began := time.Now()
	testenv.Wait(t, 8*time.Second, "ERROR", func() bool { return c.Get(s.Id).Status == "ERROR" })
	got := c.Get(s.Id)
	t.Logf("ERROR after %s: %s", time.Since(began).Round(time.Millisecond), *got.Error)
	if got.Error == nil || len(*got.Error) < 10 || got.EndReason != nil || got.EndedAt == nil {
		t.Errorf("lost session: %+v", got)
	}
	select {
	case <-cdp.Done():
		if code := cdp.CloseStatus(); code != 1011 {
			t.Errorf("close code %d (%v), want 1011", code, cdp.Err())
		}
	case <-time.After(10 * time.Second):
		t.Error("the client of a lost machine was not told")
	}
	testenv.Wait(t, 10*time.Second, "its processes are gone", func() bool { return !env.Alive(p.PID) })
	var me api.Me
	c.Want(200, http.MethodGet, "/v1/auth/me", nil, &me)
	if me.Usage.RunningSessions != 0 {
		t.Errorf("%d sessions still count", me.Usage.RunningSessions)
	}
}
