package egress

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/apierr"
)

// The password of a customer's proxy is for gateway and proxyd: nothing shows it,
// and neither the host's daemon nor anything in the machine has it in memory.
func TestPasswordStaysWithGatewayAndProxyd(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	squid := startSquid(t, web.WebHost)
	s := c.Create(testenv.Fields{"shell": true, "proxy": squid.rule(testenv.Fields{"scope": "all"})})
	mark := "mark-" + s.Id
	c.Output(s.Id, "MARK="+mark+"; (sleep 27182 >/dev/null 2>&1 &)")
	for range 3 {
		fetch(c, s.Id, web.at("one.test", "/from"))
		goTo(t, s, web.at("two.test", "/from"))
	}
	wrong := squid.rule(testenv.Fields{"scope": "all"})
	wrong["server"] = "http://" + web.Addr // no port
	told := c.Refused(apierr.InvalidRequest, "server", http.MethodPatch, "/v1/sessions/"+s.Id, testenv.Fields{"proxy": wrong})
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/proxy/rotate", nil, nil)
	fetch(c, s.Id, web.at("one.test", "/from"))

	shown := map[string][]byte{"a refused PATCH": told.Body, "proxyd's metrics": []byte(env.Metrics(t, testenv.Proxyd)), "hostd's metrics": []byte(env.Metrics(t, testenv.Hostd))}
	for _, path := range []string{"/v1/sessions/" + s.Id, "/v1/sessions", "/v1/sessions/" + s.Id + "/events", "/v1/usage", "/v1/auth/me"} {
		shown[path] = c.Do(http.MethodGet, path, nil).Body
	}
	daemons := []string{testenv.Gateway, testenv.ProxydName(0), testenv.ProxydName(1), testenv.HostName(0), testenv.HostName(1)}
	for _, d := range daemons {
		shown["the log of "+d] = []byte(env.Log(d))
	}
	shown["the machine's environment"] = []byte(c.Output(s.Id, "sudo cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; env"))
	for what, b := range shown {
		for _, form := range forms() {
			if bytes.Contains(b, []byte(form)) {
				t.Errorf("%s shows the password", what)
			}
		}
	}
	memories(t, env, s.Id, mark)
}

// forms are what the password looks like, plain and in a login of HTTP.
func forms() []string {
	_, encoded, _ := strings.Cut(strings.TrimSpace(basicAuth(user, password)), "Basic ")
	return []string{password, encoded}
}

// memories searches those of hostds and of all processes in machines; the
// session's id and the mark show that the search finds what is there.
func memories(t *testing.T, env *testenv.Env, id, mark string) {
	t.Helper()
	found := map[string]int{}
	search := func(what string, pid int) {
		for _, form := range inMemory(pid, append(forms(), id, mark)) {
			found[what+" "+form]++
		}
	}
	search("hostd", env.PID(testenv.HostName(0)))
	search("hostd", env.PID(testenv.HostName(1)))
	processes := neighbours(t, env, env.FindProcess(t, "sleep", "27182").PID)
	for _, pid := range processes {
		search("machine", pid)
	}
	if found["hostd "+id] == 0 || found["machine "+mark] == 0 || len(processes) < 5 {
		t.Errorf("the search finds nothing: %v in %d processes", found, len(processes))
	}
	for _, form := range forms() {
		if n := found["hostd "+form] + found["machine "+form]; n > 0 {
			t.Errorf("%d memories have %q: %v", n, form, found)
		}
	}
}

// neighbours are the processes of a process's machine, which has a network
// namespace of its own.
func neighbours(t *testing.T, env *testenv.Env, pid int) []int {
	t.Helper()
	namespace := func(pid int) string {
		name, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid)) // empty: it has ended
		return name
	}
	return slices.DeleteFunc(env.MachineProcesses(), func(other int) bool { return namespace(other) != namespace(pid) })
}

const page = 4096

// inMemory gives those of some texts that lie in what a process may write to.
// Pages that are not there, of which a race-checked process has terabytes, are
// passed over.
func inMemory(pid int, want []string) (found []string) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", pid))
	mem, err2 := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	pagemap, err3 := os.Open(fmt.Sprintf("/proc/%d/pagemap", pid))
	if err != nil || err2 != nil || err3 != nil {
		return nil // it has ended
	}
	defer mem.Close()
	defer pagemap.Close()
	see := func(memory []byte) {
		for _, text := range want {
			if !slices.Contains(found, text) && bytes.Contains(memory, []byte(text)) {
				found = append(found, text)
			}
		}
	}
	var from, to uint64
	var rights string
	for line := range strings.Lines(string(maps)) {
		var a, b uint64
		var r string
		if n, _ := fmt.Sscanf(line, "%x-%x %s", &a, &b, &r); n == 3 {
			from, to, rights = a, b, r
			continue
		}
		var kib int
		if n, _ := fmt.Sscanf(line, "Rss: %d kB", &kib); n == 1 && kib > 0 && strings.HasPrefix(rights, "rw") {
			inRange(mem, pagemap, from, to, see)
		}
	}
	return found
}

// inRange shows the pages that are present, run by run.
func inRange(mem, pagemap *os.File, from, to uint64, see func([]byte)) {
	const chunk = 1 << 16 // pages looked up at once
	entries := make([]byte, 8*chunk)
	var run uint64 // where the pages present now began; 0: none
	for at := from; at < to; at += chunk * page {
		n, _ := pagemap.ReadAt(entries[:8*min(chunk, (to-at)/page)], int64(at/page*8))
		for i := 0; i+8 <= n; i += 8 {
			here := at + uint64(i/8)*page
			present := binary.NativeEndian.Uint64(entries[i:])>>62 != 0 // in memory, or swapped out
			if present && run == 0 {
				run = here
			}
			if run != 0 && (!present || here-run > 64<<20) {
				see(read(mem, run, here))
				run = 0
				if present {
					run = here - page // a little twice: it may lie across
				}
			}
		}
	}
	if run != 0 {
		see(read(mem, run, to))
	}
}

func read(mem *os.File, from, to uint64) []byte {
	b := make([]byte, to-from)
	n, _ := mem.ReadAt(b, int64(from))
	return b[:n]
}
