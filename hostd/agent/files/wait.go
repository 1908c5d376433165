package files

import (
	"context"
	"io/fs"
	"net/http"
	"os"
	"path"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/hostd/agent/reply"
	"github.com/berth-dev/berth/shared/apierr"
)

// Bounds of a wait (decisions "Files").
const (
	defaultWait = 30 * time.Second
	maxWait     = 10 * time.Minute
	// still is how long a file must not have changed to count as finished.
	still = 500 * time.Millisecond
)

// pattern is a folder and a glob for names in it.
type pattern struct {
	dir, glob string // dir is lexically inside the workspace; it need not exist yet
}

// wait answers with a finished file that matches, or 408.
func (f *Files) wait(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	p, err := f.parsePattern(q.Get("pattern"))
	if err != nil {
		return err
	}
	limit := defaultWait
	if q.Has("timeoutMs") {
		ms, err := strconv.ParseInt(q.Get("timeoutMs"), 10, 64)
		if err != nil || ms < 1 || ms > maxWait.Milliseconds() {
			return apierr.New(apierr.InvalidRequest, "timeoutMs: must be a whole number from 1 to %d", maxWait.Milliseconds())
		}
		limit = time.Duration(ms) * time.Millisecond
	}
	late := apierr.New(apierr.WaitTimeout, "no finished file matched %s within %d ms", shown(q.Get("pattern")), limit.Milliseconds())
	ctx, cancel := context.WithTimeoutCause(r.Context(), limit, late)
	defer cancel()
	found, err := f.waitFor(ctx, p)
	if err != nil {
		return err
	}
	reply.JSON(w, http.StatusOK, found)
	return nil
}

// parsePattern splits a pattern and refuses globs elsewhere than at its end.
func (f *Files) parsePattern(text string) (pattern, error) {
	rel, err := f.tree.Lexical("pattern", text)
	if err != nil {
		return pattern{}, err
	}
	dir, glob := path.Split(rel)
	if rel == "." || strings.HasSuffix(text, "/") {
		return pattern{}, apierr.New(apierr.InvalidRequest, "pattern: must end with a file's name or a glob for names")
	}
	if strings.ContainsAny(dir, `*?[`) {
		return pattern{}, apierr.New(apierr.InvalidRequest, "pattern: must have its glob in the last segment only")
	}
	if _, err := path.Match(glob, ""); err != nil {
		return pattern{}, apierr.New(apierr.InvalidRequest, "pattern: the glob %q is not well formed", shown(glob))
	}
	if dir = path.Clean(dir); dir == "" {
		dir = "."
	}
	if _, err := f.tree.Resolve("pattern", f.tree.Abs(dir)); err != nil {
		return pattern{}, err
	}
	return pattern{dir, glob}, nil
}

// seen is when a candidate's bytes last changed, by our own clock.
type seen struct {
	size   int64
	change time.Time
	since  time.Time
}

// waitFor looks, then sleeps until the folder changes or a candidate may have
// become old enough. ctx's cause is the error at its end.
func (f *Files) waitFor(ctx context.Context, p pattern) (pathSize, error) {
	watch, err := newWatch()
	if err != nil {
		return pathSize{}, err
	}
	defer watch.close()
	history := make(map[string]seen)
	for {
		rel, err := f.tree.Resolve("pattern", f.tree.Abs(p.dir))
		if err != nil {
			return pathSize{}, err
		}
		watch.follow(f.tree, rel) // before the look, so that no change falls between
		found, again := f.look(rel, p.glob, history)
		if found != nil {
			return *found, nil
		}
		if err := watch.next(ctx, again); err != nil {
			return pathSize{}, err
		}
	}
}

// look searches the folder once. again is when it is worth looking again
// without a change being told.
func (f *Files) look(dir, glob string, history map[string]seen) (found *pathSize, again time.Duration) {
	again = watchFallback
	var newest time.Time
	for _, info := range f.matches(dir, glob) {
		wait := f.age(info, history)
		if wait == 0 && (writers(info) || f.changed(path.Join(dir, info.Name()), info)) {
			wait = still // a close is told at once, if inotify works here
		}
		if wait > 0 {
			again = min(again, wait)
			continue
		}
		if found == nil || info.ModTime().After(newest) {
			newest = info.ModTime()
			found = &pathSize{f.abs(path.Join(dir, info.Name())), info.Size()}
		}
	}
	return found, again
}

// changed says whether the file is another than info describes: its last
// writer may have written and gone between the look at its size and at writers.
func (f *Files) changed(name string, info fs.FileInfo) bool {
	rel, err := f.tree.Resolve("pattern", f.tree.Abs(name))
	if err != nil {
		return true
	}
	now, err := f.tree.Root.Lstat(rel)
	return err != nil || now.Size() != info.Size() || !changeTime(now).Equal(changeTime(info))
}

// changeTime is a file's ctime: no program can set it, every write moves it.
func changeTime(info fs.FileInfo) time.Time {
	return time.Unix(info.Sys().(*syscall.Stat_t).Ctim.Unix())
}

// matches lists the regular files of dir that the glob takes and that are not
// downloads under way. A folder that is missing holds nothing yet.
func (f *Files) matches(dir, glob string) []fs.FileInfo {
	d, err := f.tree.Root.OpenFile(dir, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	var out []fs.FileInfo
	for _, name := range names {
		if ok, _ := path.Match(glob, name); !ok || underWay(name) {
			continue
		}
		rel, err := f.tree.Resolve("pattern", f.tree.Abs(path.Join(dir, name)))
		if err != nil {
			continue
		}
		if info, err := f.tree.Root.Lstat(rel); err == nil && info.Mode().IsRegular() {
			out = append(out, named{info, name})
		}
	}
	return out
}

// named is a link's target under the link's name.
type named struct {
	fs.FileInfo
	name string
}

func (n named) Name() string { return n.name }

func underWay(name string) bool {
	return strings.HasSuffix(name, ".crdownload") || strings.HasSuffix(name, ".part") || strings.HasPrefix(name, asidePrefix)
}

// age is how long info has yet to stand still, 0 when it has. The first look
// trusts the file's ctime; later ones what was seen, so that a clock that
// jumps costs at most one period.
func (f *Files) age(info fs.FileInfo, history map[string]seen) time.Duration {
	now := time.Now()
	change := changeTime(info)
	last, known := history[info.Name()]
	if !known || last.size != info.Size() || !last.change.Equal(change) {
		last = seen{info.Size(), change, now}
		if old := now.Sub(change); old > 0 {
			last.since = now.Add(-min(old, still))
		}
		history[info.Name()] = last
	}
	return max(0, still-now.Sub(last.since))
}
