package shell

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/berth-dev/berth/shared/agentlink"
)

// markVar is in the environment of everything a command starts, so that what
// has left bash's process tree can still be found.
const markVar = "BERTH_EXEC"

// The files every bash sources, and why they exist: inside a sourced file an
// interactive bash behaves as a script does (no "[1] 123", no "exit" on
// stderr), yet SIGINT still throws it back to its top level with all state.
var driverFiles = map[string]string{
	"run": `\builtin eval "$__berth"` + "\n",
	// With a folder or variables for this command only; "back" undoes both, but
	// for the folder when the command itself went elsewhere. $? survives the
	// way in. (FOO=1 eval "..." would do for variables, but bash 5.2 exports
	// them to the first program in the text only.)
	"in": `__berth_st=$?
if [[ -n $__berth_cwd ]]; then \builtin cd -- "$__berth_cwd" || \builtin return; __berth_cwd=$PWD; fi
\builtin eval "$__berth_set"
[[ $- == *e* ]] || \builtin . "$__berth_dir/st" "$__berth_st"
\builtin eval "$__berth"
`,
	"back": `__berth_st=$?
if [[ -n $__berth_cwd && $PWD == "$__berth_cwd" ]]; then \builtin cd -- "$__berth_pwd"; OLDPWD=$__berth_old; fi
\builtin eval "$__berth_undo"
\builtin unset -v __berth_cwd __berth_pwd __berth_old __berth_set __berth_undo __berth_dir
\builtin return "$__berth_st"
`,
	// Sets $?: bash has no assignment for it.
	"st": `\builtin return "$1"` + "\n",
}

func writeDriver(dir string) error {
	for name, text := range driverFiles {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// abortSignal, trapped, makes bash throw away the command it runs: a trap runs
// between commands, so nothing that follows the killed one is started, and
// SIGINT inside the trap unwinds to the top level. 63 is SIGRTMAX-1 of bash's
// own numbering, which programs leave alone.
const abortSignal = 63

const prologue = `PS1= PS2= PS0=; \builtin unset MAILCHECK __berth_dir; \builtin shopt -s expand_aliases
\builtin trap '\builtin trap - INT; \builtin kill -INT $$' RTMAX-1
`

// bashArgs: interactive because only such a bash survives SIGINT with its
// state; history and "!" expansion off, as in scripts.
var bashArgs = []string{"--noprofile", "--norc", "--noediting", "-i", "+H", "+o", "history"}

// quote makes s one word of bash that stands for exactly its bytes.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// inlineLimit is how long a command may be to travel as a quoted word. bash
// needs time quadratic in the quotes of one word (seconds for a mebibyte of
// source code), so longer ones are read from a file.
const inlineLimit = 4 << 10

// loadLine puts the command's text into __berth.
func (b *bash) loadLine(text string) (string, error) {
	if len(text) <= inlineLimit {
		return "__berth=" + quote(text), nil
	}
	b.files.Lock()
	defer b.files.Unlock()
	path := filepath.Join(b.dir, "c") // one is enough: commands of a shell follow each other
	if err := os.WriteFile(path, []byte(text+"\x00"), 0o644); err != nil {
		return "", err
	}
	return `IFS= \builtin read -r -d '' __berth <` + path, nil
}

// script is what bash reads for one command, load being its loadLine. It tells
// the status pipe that the command begins, and how it ended. The end is told in
// the command's own line, which bash has read whole before it runs: a command may
// close what bash reads from. An error that ends that line early (a read-only
// variable in env, SIGINT) leaves __berth as it is and is reported by the lines after it.
func (b *bash) script(c *Command, id uint64, load, stdout, stderr string) string {
	var w strings.Builder
	fmt.Fprintf(&w, "%s; \\builtin export -n __berth; \\builtin export %s=%s\n", load, markVar, b.commandMark(id)) // -n: for shells under set -a
	fmt.Fprintf(&w, "\\builtin printf 'b%d\\n' >|%s/s\n", id, b.dir)                                               // last before what may run the customer's code; no fork
	file := "run"
	guest := c.Cwd != "" || len(c.Env) > 0
	if guest {
		file = "in"
		b.guestLines(&w, c)
	}
	if b.status != 0 {
		fmt.Fprintf(&w, "[[ $- == *e* ]] || \\builtin . %s/st %d\n", b.dir, b.status) // under set -e it would end the shell
	}
	fmt.Fprintf(&w, "\\builtin . %s/%s </dev/null >|%s 2>|%s; ", b.dir, file, stdout, stderr)
	back := ""
	if guest {
		back = "\\builtin . " + b.dir + "/back"
		w.WriteString(back + "; ")
	}
	report := strings.TrimSuffix(b.reportLine(id), "\n")
	fmt.Fprintf(&w, "%s && __berth=\n", report)
	for _, line := range []string{back, report} {
		if line != "" {
			fmt.Fprintf(&w, "case ${__berth-} in '') ;; *) %s ;; esac\n", line)
		}
	}
	return w.String()
}

// guestLines prepare "in" and "back": what to set, and what restores it.
func (b *bash) guestLines(w *strings.Builder, c *Command) {
	fmt.Fprintf(w, "__berth_cwd=%s __berth_pwd=${PWD-} __berth_old=${OLDPWD-} __berth_dir=%s __berth_undo=\n", quote(c.Cwd), quote(b.dir))
	var set strings.Builder
	for _, k := range sorted(c.Env) {
		fmt.Fprintf(&set, "\\builtin unset -v %[1]s 2>/dev/null\n\\builtin export %[1]s=%[2]s\n", k, quote(c.Env[k])) // an array's place first
		// ${k[@]@A} is the declaration of k as it is, arrays and attributes included.
		fmt.Fprintf(w, "__berth_undo+=\"\\builtin unset -v %[1]s\n${%[1]s[@]+${%[1]s[@]@A}}\n\"\n", k)
	}
	fmt.Fprintf(w, "__berth_set=%s\n", quote(set.String()))
	w.WriteString("\\builtin export -n __berth_cwd __berth_pwd __berth_old __berth_dir __berth_undo __berth_set\n")
}

// reportLine tells id, exit code and the newest background job's process.
func (b *bash) reportLine(id uint64) string {
	return fmt.Sprintf("\\builtin printf '%d %%d %%s\\n' \"$?\" \"${!:-0}\" >|%s/s\n", id, b.dir)
}

// exports brings a running shell from one version of the session's variables
// to the next.
func exports(was, now *vars) string {
	var w strings.Builder
	for _, k := range sorted(was.m) {
		if _, still := now.m[k]; !still {
			fmt.Fprintf(&w, "\\builtin unset %s\n", k)
		}
	}
	for _, k := range sorted(now.m) {
		if v, had := was.m[k]; !had || v != now.m[k] {
			fmt.Fprintf(&w, "\\builtin export %s=%s\n", k, quote(now.m[k]))
		}
	}
	if was.proxy != now.proxy {
		proxyLines(&w, now)
	}
	return w.String()
}

// proxyLines set the proxy variables that are not set, or unset those that are
// as we set them. A line is true whatever comes of it: the shell may be under set -e.
func proxyLines(w *strings.Builder, now *vars) {
	ours := agentlink.ProxyVars()
	for _, k := range sorted(ours) {
		switch _, own := now.m[k]; {
		case own:
		case now.proxy:
			fmt.Fprintf(w, "[[ -n ${%[1]s+x} ]] || \\builtin export %[1]s=%[2]s || \\builtin true\n", k, quote(ours[k]))
		default:
			fmt.Fprintf(w, "[[ ${%[1]s-} != %[2]s ]] || \\builtin unset -v %[1]s || \\builtin true\n", k, quote(ours[k]))
		}
	}
}

func sorted(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
