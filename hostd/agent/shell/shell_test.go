package shell

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/hostd/agent/account"
	"github.com/berth-dev/berth/hostd/agent/procfs/procfstest"
	"github.com/berth-dev/berth/hostd/agent/workspace"
	"github.com/berth-dev/berth/shared/apierr"
)

func TestMain(m *testing.M) {
	procfstest.Check()
	goleak.VerifyTestMain(m)
}

// runAs is the account tests run commands as: an ordinary one where possible.
func runAs() account.Account {
	if os.Getuid() == 0 {
		return account.Account{Name: "user", Home: "/", UID: 1000, GID: 1000}
	}
	return account.Current()
}

// folders makes a workspace and a state folder that the account can use.
func folders(t testing.TB) (work, state string) {
	t.Helper()
	top, err := os.MkdirTemp("", "berth-shell-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(top) })
	work, state = filepath.Join(top, "workspace"), filepath.Join(top, "state")
	for _, dir := range []string{top, work, state} {
		_ = os.Mkdir(dir, 0o755)
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := runAs().Owns(func(uid, gid int) error { return os.Chown(work, uid, gid) }); err != nil {
		t.Fatal(err)
	}
	return work, state
}

func newShells(t testing.TB, change ...func(*Config)) *Shells {
	t.Helper()
	work, state := folders(t)
	tree, err := workspace.Open(work)
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{Account: runAs(), Workspace: tree, StateDir: state}
	for _, f := range change {
		f(&cfg)
	}
	s := New(cfg)
	t.Cleanup(func() {
		s.Close()
		tree.Close()
		left, err := os.ReadDir(state)
		if err != nil || len(left) > 0 {
			t.Errorf("state folder after Close: %v, %v; want it empty", left, err)
		}
	})
	return s
}

// ran is what a test sees of a command.
type ran struct {
	out, err string
	code     int // -1 for null
	timedOut bool
}

func try(s *Shells, c Command) (ran, error) {
	if c.Timeout == 0 {
		c.Timeout = 20 * time.Second
	}
	var stdout, stderr bytes.Buffer
	o, err := s.Exec(context.Background(), &c, Sinks{Stdout: &stdout, Stderr: &stderr})
	r := ran{out: stdout.String(), err: stderr.String(), code: -1, timedOut: o.TimedOut}
	if o.ExitCode != nil {
		r.code = *o.ExitCode
	}
	return r, err
}

func run(t testing.TB, s *Shells, c Command) ran {
	t.Helper()
	r, err := try(s, c)
	if err != nil {
		t.Fatalf("%q: %v", cut(c.Text, 80), err)
	}
	return r
}

// sh runs text in the default shell.
func sh(t testing.TB, s *Shells, text string) ran {
	t.Helper()
	return run(t, s, Command{Text: text, Shell: Default})
}

// TestStateStays runs each list in one shell; only the last output counts.
func TestStateStays(t *testing.T) {
	s := newShells(t)
	for name, c := range map[string]struct {
		steps []string
		want  string
	}{
		"variable":      {[]string{`x="a b"`, `echo "$x"`}, "a b\n"},
		"export":        {[]string{"export EX=1", "env | grep ^EX="}, "EX=1\n"},
		"cd":            {[]string{"mkdir -p d/e; cd d/e", "basename $PWD; cd ../.."}, "e\n"},
		"function":      {[]string{"f() { echo hi $1; }", "f you"}, "hi you\n"},
		"associative":   {[]string{"declare -A A; A[k]=v", "echo ${A[k]}"}, "v\n"},
		"alias":         {[]string{"alias greet='echo hello'", "greet"}, "hello\n"},
		"trap":          {[]string{"trap 'echo got' USR1", "kill -USR1 $$; :"}, "got\n"},
		"descriptor":    {[]string{"exec 5>five; echo in >&5", "echo more >&5; exec 5>&-; cat five"}, "in\nmore\n"},
		"shopt":         {[]string{"shopt -s nullglob", "echo [nothing]*; shopt -u nullglob"}, "\n"},
		"exit status":   {[]string{"(exit 7)", "echo $?"}, "7\n"},
		"positional":    {[]string{"set -- a 'b c'", `echo "$# $2"`}, "2 b c\n"},
		"allexport":     {[]string{"set -a; V=1; set +a", "env | grep ^V="}, "V=1\n"},
		"heredoc":       {[]string{"cat <<'E'\n$x `y`\nE\n"}, "$x `y`\n"},
		"quotes":        {[]string{`echo 'it'\''s' "a\"b" $'\x41'`}, "it's a\"b A\n"},
		"comment":       {[]string{"echo a # not this"}, "a\n"},
		"bang":          {[]string{`echo "hi!there !1"`}, "hi!there !1\n"},
		"stdin":         {[]string{"read x; echo $? $x; cat"}, "1\n"},
		"name":          {[]string{"echo $0"}, "bash\n"},
		"exec redirect": {[]string{"exec >lost; echo lost", "cat lost; echo back"}, "lost\nback\n"},
		"break":         {[]string{"break; continue", "echo on"}, "on\n"},
		"return":        {[]string{"return 3; echo no", "echo $?"}, "3\n"},
	} {
		var got ran
		for _, step := range c.steps {
			got = sh(t, s, step)
		}
		if got.out != c.want {
			t.Errorf("%s: stdout %q, stderr %q; want %q", name, got.out, got.err, c.want)
		}
	}
}

// TestNoPrivateDescriptors compares with a fresh bash, for whoever started the
// tests may have left descriptors open.
func TestNoPrivateDescriptors(t *testing.T) {
	s := newShells(t)
	list := "ls /proc/self/fd | wc -l"
	if got, want := sh(t, s, list), run(t, s, Command{Text: list}); got != want {
		t.Errorf("descriptors of a command: %q, of a fresh process: %q", got.out, want.out)
	}
}

// TestShellGoesOn runs what hurts a shell, then checks the answer and that the
// next command works.
func TestShellGoesOn(t *testing.T) {
	for name, c := range map[string]struct {
		text  string
		code  int
		err   string // stderr contains
		fresh bool   // the shell's state is gone afterwards
	}{
		"syntax":         {"if then", 2, "syntax error", false},
		"open quote":     {"echo 'abc", 2, "unexpected EOF", false},
		"open brace":     {"{ echo", 2, "unexpected end of file", false},
		"not found":      {"nosuchprogram", 127, "nosuchprogram: command not found", false},
		"bad expansion":  {"echo ${x?gone}", 1, "gone", false},
		"division":       {"echo $((1/0))", 1, "division by 0", false},
		"readonly":       {"readonly RO=1; RO=2", 1, "readonly variable", false},
		"unset variable": {"set -u; echo $nope; set +u", 1, "unbound variable", false},
		"exit":           {"exit 3", 3, "", true},
		"exit in trap":   {"trap 'echo bye >&2' EXIT; exit 4", 4, "bye", true},
		"killed":         {"kill -9 $$", 137, "", true},
		"terminated":     {"trap - TERM; kill -KILL $BASHPID", 137, "", true},
		"exec":           {"exec sh -c 'exit 5'", 5, "", true},
		"errexit":        {"set -e; false; echo no", 1, "", true},
		"closed fds":     {"exec 0<&- 1>&- 2>&-", 0, "", false},
		"noclobber":      {"set -C", 0, "", false},
		"failglob":       {"shopt -s failglob; echo /nope*", 1, "no match", false},
		"posix":          {"set -o posix", 0, "", false},
		"xtrace":         {"set -x; :; set +x", 0, "set +x", false},
		"debug trap":     {"trap ': debug' DEBUG", 0, "", false},
		"function names": {"printf() { :; }; read() { :; }; eval() { :; }; cd() { :; }; trap() { :; }; export() { :; }", 0, "", false},
		"aliases":        {"alias printf=false eval=false .=false", 0, "", false},
		"prompt":         {"PROMPT_COMMAND='false; nope' PS1='$(nope)'", 0, "", false},
		"no path":        {"PATH=", 0, "", false},
		"ifs":            {"IFS=0123456789", 0, "", false},
		"no home":        {"unset HOME PATH PWD OLDPWD SHELL", 0, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newShells(t)
			sh(t, s, "keep=yes")
			got := sh(t, s, c.text)
			if got.code != c.code || !strings.Contains(got.err, c.err) || c.err == "" && got.err != "" {
				t.Errorf("code %d, stderr %q; want %d, %q", got.code, got.err, c.code, c.err)
			}
			want := "yes\n"
			if c.fresh {
				want = "\n"
			}
			if next := sh(t, s, `\builtin echo "$keep"`); next.out != want || next.code != 0 {
				t.Errorf("next command: %+v; want stdout %q", next, want)
			}
		})
	}
}

// A command that its bash never came to runs in a fresh one, once.
func TestDoomedShell(t *testing.T) {
	var closing strings.Builder
	closing.WriteString("exec")
	for fd := 3; fd < 256; fd++ {
		fmt.Fprintf(&closing, " %d>&-", fd)
	}
	for name, doom := range map[string]string{
		"closed descriptors": closing.String(),
		"readonly mark":      "readonly BERTH_EXEC; set -e",
	} {
		t.Run(name, func(t *testing.T) {
			s := newShells(t)
			for round := range 5 {
				if got := sh(t, s, doom); got.code != 0 || got.out != "" {
					t.Fatalf("doom: %+v", got)
				}
				for i := range 4 {
					if got := sh(t, s, "echo hi; echo x >>ran"); got.out != "hi\n" || got.code != 0 {
						t.Fatalf("round %d, command %d: %+v", round, i, got)
					}
				}
			}
			if got := sh(t, s, "wc -l <ran"); got.out != "20\n" {
				t.Errorf("commands ran: %+v, want 20", got)
			}
		})
	}
}

// What bash said before its end counts, however late it is heard.
func TestLastCode(t *testing.T) {
	for name, c := range map[string]struct {
		lines string
		code  int
	}{
		"reported": {"b7\n7 5 0\n", 5}, "begun": {"b6\n6 1 0\nb7\n", 137}, "before": {"b6\n6 1 0\n", neverBegan},
		"nothing": {"", neverBegan}, "junk": {"b\nbx\n\n7\n" + strings.Repeat("b7", 600) + "\nb7", neverBegan},
	} {
		b := &bash{reports: make(chan report, 16), exit: 137}
		b.hear(strings.NewReader(c.lines))
		if got := b.last(7); got != c.code {
			t.Errorf("%s: %d, want %d", name, got, c.code)
		}
	}
}

// A shell that ends takes its folder along, whatever a command prepares in it
// just then.
func TestTheFolderGoesWithItsShell(t *testing.T) {
	_, state := folders(t)
	long := strings.Repeat("x", inlineLimit+1)
	for round := range 200 {
		b := &bash{dir: filepath.Join(state, strconv.Itoa(round))}
		if err := os.Mkdir(b.dir, 0o755); err != nil {
			t.Fatal(err)
		}
		begun, refused := make(chan struct{}), make(chan error, 1)
		go func() {
			for id := uint64(0); ; id++ {
				p, err := b.pipes(id, runAs())
				if err == nil {
					p.abandon()
					_, err = b.loadLine(long)
				}
				if err != nil {
					refused <- err
					return
				}
				if id == 0 {
					close(begun)
				}
			}
		}()
		<-begun
		b.removeDir()
		if _, err := os.Stat(b.dir); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("round %d: the folder is there still: %v", round, err)
		}
		if err := <-refused; !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
}

func TestOneCommandOnly(t *testing.T) {
	s := newShells(t)
	dir := filepath.Join(s.cfg.Workspace.Dir, "sub dir")
	sh(t, s, "mkdir -p 'sub dir/deeper' other; OUT=old; export OUT")

	c := Command{Text: `echo "$OUT $NEW"; env | grep -c '^NEW='; false`, Shell: Default, Env: map[string]string{"OUT": "it's\n2", "NEW": `$x`}}
	if got := run(t, s, c); got.out != "it's\n2 $x\n1\n" {
		t.Errorf("env: %+v", got)
	}
	if got := sh(t, s, `echo "$? $OUT ${NEW-unset}"`); got.out != "1 old unset\n" {
		t.Errorf("after env: %+v", got)
	}

	sh(t, s, "A=(1 '2 x'); plain=p; set -u")
	c = Command{Text: `:; env | grep -c '^\(A\|plain\)=n'; A=changed`, Shell: Default, Env: map[string]string{"A": "new", "plain": "new"}}
	if got := run(t, s, c); got.out != "2\n" {
		t.Errorf("env over an array: %+v", got)
	}
	if got := sh(t, s, `set +u; echo "${A[1]} $plain $(env | grep -c plain)"`); got.out != "2 x p 0\n" {
		t.Errorf("array after env: %+v", got)
	}

	c = Command{Text: `echo "$?"; pwd; false`, Cwd: dir, Shell: Default}
	sh(t, s, "cd other; (exit 9)")
	if got := run(t, s, c); got.out != "9\n"+dir+"\n" || got.code != 1 {
		t.Errorf("cwd: %+v", got)
	}
	if got := sh(t, s, `echo $? $(basename "$PWD") $(basename "$OLDPWD")`); got.out != "1 other workspace\n" {
		t.Errorf("after cwd: %+v", got)
	}
	c.Text = "cd deeper"
	run(t, s, c)
	if got := sh(t, s, "pwd"); got.out != dir+"/deeper\n" {
		t.Errorf("cd inside cwd: %+v", got)
	}
	if got := sh(t, s, "set | grep ^__berth_ | grep -v ^__berth_st="); got.out != "" {
		t.Errorf("variables left: %q", got.out)
	}

	c = Command{Text: "echo no", Shell: Default, Env: map[string]string{"UID": "7"}}
	if got := run(t, s, c); !strings.Contains(got.err, "UID: readonly variable") {
		t.Errorf("read-only variable: %+v", got)
	}
	if got := sh(t, s, "echo fine"); got.out != "fine\n" {
		t.Errorf("after a read-only variable: %+v", got)
	}
}

func TestSessionEnv(t *testing.T) {
	s := newShells(t)
	if err := s.Warm(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.SetEnv(map[string]string{"A": "1'2", "B": "x"})
	show := `echo "$A ${B-none}"`
	if got := sh(t, s, show); got.out != "1'2 x\n" {
		t.Errorf("running shell: %+v", got)
	}
	if got := run(t, s, Command{Text: show}); got.out != "1'2 x\n" {
		t.Errorf("fresh process: %+v", got)
	}
	s.SetEnv(map[string]string{"A": "3"})
	if got := sh(t, s, show); got.out != "3 none\n" {
		t.Errorf("after a change: %+v", got)
	}
	want := []string{"USER=user", "LANG=C.UTF-8", "TERM=dumb", "/usr/local/sbin:"}
	if got := sh(t, s, "env"); true {
		for _, w := range want {
			if !strings.Contains(got.out, w) {
				t.Errorf("env lacks %s: %s", w, got.out)
			}
		}
	}
}

func TestNames(t *testing.T) {
	s := newShells(t)
	run(t, s, Command{Text: "x=1", Shell: "one"})
	if got := run(t, s, Command{Text: "echo ${x-none}", Shell: "two"}); got.out != "none\n" {
		t.Errorf("shells share state: %+v", got)
	}
	for i := len(s.lanes); i < MaxShells; i++ {
		s.lanes[strings.Repeat("n", i)] = &lane{s: s, turn: make(chan struct{}, 1)}
	}
	_, err := try(s, Command{Text: ":", Shell: "onemore"})
	if !apierr.Is(err, apierr.InvalidRequest) {
		t.Errorf("shell %d: %v", MaxShells+1, err)
	}
	if err := s.Restart(t.Context(), "two"); err != nil {
		t.Fatal(err)
	}
	if got := run(t, s, Command{Text: "echo ok", Shell: "onemore"}); got.out != "ok\n" {
		t.Errorf("after a restart freed a name: %+v", got)
	}
}
