// Package rules enforces, over the import graph and the sources, what a
// reviewer would otherwise have to remember.
package rules

import (
	"encoding/json"
	"errors"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const module = "github.com/berth-dev/berth/"

type pkg struct {
	ImportPath, Dir, Doc               string
	Name                               string
	GoFiles, TestGoFiles, XTestGoFiles []string
	Imports, TestImports, XTestImports []string
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Doc,Name,GoFiles,TestGoFiles,XTestGoFiles,Imports,TestImports,XTestImports", "./...")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if len(all) < 20 {
		t.Fatalf("only %d packages: is this the module's root?", len(all))
	}
	return all
}

// owners says which one package imports a third-party module, and why there.
// A path ending in /... allows the packages below it.
var owners = []struct{ module, owner, why string }{
	{"github.com/valyala/fasthttp", "gateway/api", "HTTP in and out of the gateway"},
	{"github.com/fasthttp/router", "gateway/api", "the API's routes"},
	{"github.com/hashicorp/raft", "gateway/placement", "the replicated record"},
	{"github.com/hashicorp/raft-boltdb/v2", "gateway/placement", "the record's log"},
	{"github.com/hashicorp/go-memdb", "gateway/placement", "the record's state"},
	{"github.com/hashicorp/memberlist", "shared/gossip", "finding members"},
	{"go.etcd.io/bbolt", "shared/store", "local state"},
	{"github.com/things-go/go-socks5", "proxyd/front", "the SOCKS5 handshake"},
	{"github.com/go-rod/rod", "hostd/agent/browser", "driving Chrome"},
	{"github.com/coder/websocket", "shared/ws", "both ends of a WebSocket"},
	{"github.com/creack/pty", "hostd/agent/terminal", "the terminal's pty"},
	{"github.com/vishvananda/netlink", "hostd/network", "slots"},
	{"github.com/opencontainers/runtime-spec", "hostd/machine/oci", "the container's config.json"},
	{"github.com/alecthomas/kong", "shared/daemon", "flags with environment and help"},
	{"github.com/VictoriaMetrics/metrics", "shared/daemon", "metrics"},
	{"github.com/getkin/kin-openapi", "shared/api", "reading openapi.yaml"},
	{"github.com/oapi-codegen/runtime", "shared/api", "types generated from openapi.yaml"},
	{"github.com/google/uuid", "gateway/sessions", "session ids"},
	{"gocloud.dev", "shared/blob", "folders and S3-compatible stores"},
	{"github.com/klauspost/compress", "hostd/snapshot", "zstd"},
}

// extensions of the standard library and test tools have no owner.
var free = []struct{ prefix, why string }{
	{"golang.org/x/", "the Go project's own additions to the standard library"},
}

var testOnly = []struct{ prefix, why string }{
	{"pgregory.net/rapid", "property tests"},
	{"go.uber.org/goleak", "goroutines that stay"},
	{"github.com/chromedp/", "a real client"},
	{"github.com/coder/websocket", "the other end of a WebSocket under test"},
}

func TestThirdPartyPackagesHaveOneOwner(t *testing.T) {
	used := map[string]bool{}
	for _, p := range packages(t) {
		here := strings.TrimPrefix(p.ImportPath, module)
		for _, imp := range p.Imports {
			if !thirdParty(imp) || hasPrefix(imp, free) {
				continue
			}
			owner := ""
			for _, o := range owners {
				if imp == o.module || strings.HasPrefix(imp, o.module+"/") {
					owner = o.owner
					used[o.module] = true
				}
			}
			if owner == "" {
				t.Errorf("%s imports %s, which has no owner: add a row with a reason, or do without", here, imp)
			} else if owner != here {
				t.Errorf("%s imports %s, which belongs to %s", here, imp, owner)
			}
		}
		for _, imp := range append(p.TestImports, p.XTestImports...) {
			if thirdParty(imp) && !hasPrefix(imp, free) && !hasPrefix(imp, testOnly) && !owns(here, imp) {
				t.Errorf("tests of %s import %s", here, imp)
			}
		}
	}
	for _, o := range owners {
		if !used[o.module] && !strings.Contains(o.module, "oapi-codegen/runtime") {
			t.Errorf("%s is owned by %s, which does not import it: drop the row", o.module, o.owner)
		}
	}
}

func owns(here, imp string) bool {
	for _, o := range owners {
		if o.owner == here && (imp == o.module || strings.HasPrefix(imp, o.module+"/")) {
			return true
		}
	}
	return false
}

func thirdParty(imp string) bool {
	first, _, _ := strings.Cut(imp, "/")
	return strings.Contains(first, ".") && !strings.HasPrefix(imp, module)
}

func hasPrefix(imp string, rows []struct{ prefix, why string }) bool {
	for _, r := range rows {
		if strings.HasPrefix(imp, r.prefix) {
			return true
		}
	}
	return false
}

// between says what a part may not import of the others, tests included.
var between = []struct {
	from      string
	forbidden []string
	why       string
}{
	{"shared/", []string{"gateway/", "hostd/", "proxyd/", "scripts/"}, "shared is below the daemons"},
	{"gateway/", []string{"hostd/", "proxyd/", "scripts/"}, "daemons meet only over the wire"},
	{"hostd/", []string{"gateway/", "proxyd/", "scripts/"}, "daemons meet only over the wire"},
	{"proxyd/", []string{"gateway/", "hostd/", "scripts/"}, "daemons meet only over the wire"},
	{"scripts/", []string{"gateway/", "hostd/", "proxyd/"}, "what tries the product uses it from outside"},
	{"hostd/agent/", []string{"hostd/machine", "hostd/network", "hostd/session", "hostd/pool", "hostd/server"}, "the agent runs in the machine, not on the host"},
	{"gateway/placement/", []string{"gateway/api", "gateway/sessions", "gateway/hosts", "gateway/accounts"}, "the record knows nothing of who uses it"},
	{"gateway/sessions/", []string{"gateway/api"}, "use cases know no HTTP"},
}

func TestLayers(t *testing.T) {
	for _, p := range packages(t) {
		here := strings.TrimPrefix(p.ImportPath, module) + "/"
		for _, imp := range append(append(p.Imports, p.TestImports...), p.XTestImports...) {
			target := strings.TrimPrefix(imp, module) + "/"
			if target == imp+"/" {
				continue
			}
			for _, row := range between {
				for _, f := range row.forbidden {
					if strings.HasPrefix(here, row.from) && strings.HasPrefix(target, f) {
						t.Errorf("%s imports %s: %s", here, target, row.why)
					}
				}
			}
		}
	}
}

func TestEveryPackageHasADoc(t *testing.T) {
	for _, p := range packages(t) {
		doc := p.Doc
		if doc == "" && len(p.GoFiles) == 0 { // a package of tests only
			doc = testDoc(t, p)
		}
		switch want := "Package " + p.Name + " "; {
		case doc == "":
			t.Errorf("%s has no package comment", p.ImportPath)
		case p.Name == "main" && !strings.HasPrefix(doc, "Command "):
			t.Errorf("%s: its comment should begin with \"Command \"", p.ImportPath)
		case p.Name != "main" && !strings.HasPrefix(doc, want):
			t.Errorf("%s: its comment should begin with %q", p.ImportPath, want)
		}
	}
}

func testDoc(t *testing.T, p pkg) string {
	for _, name := range append(p.TestGoFiles, p.XTestGoFiles...) {
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.ParseComments|parser.PackageClauseOnly)
		if err != nil {
			t.Fatal(err)
		}
		if f.Doc != nil {
			return f.Doc.Text()
		}
	}
	return ""
}

// words that a name must not have, and what to say instead (design section 10).
var words = []struct{ word, why string }{
	{"manager", "says nothing: name what it does"},
	{"helper", "says nothing: name what it does"},
	{"util", "says nothing: name what it does"},
	{"common", "says nothing: name what is shared"},
	{"sandbox", "session is the product, machine is what runs it"},
}

func TestNames(t *testing.T) {
	root := "../.."
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := strings.ToLower(d.Name())
		if d.IsDir() && path != root && (name == "node_modules" || name == "bin" || strings.HasPrefix(name, ".")) {
			return fs.SkipDir
		}
		for _, w := range words {
			if path != root && strings.Contains(name, w.word) {
				t.Errorf("%s: %q %s", path, w.word, w.why)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// top are the entries that the module's root may have (the layout is fixed).
var top = map[string]bool{"gateway": true, "hostd": true, "proxyd": true, "shared": true, "scripts": true, "deploy": true, "bin": true,
	"go.mod": true, "go.sum": true, "Makefile": true, "README.md": true, "ARCHITECTURE.md": true, "CHANGELOG.md": true, "LICENSE": true,
	"staticcheck.conf": true}

func TestRootHoldsOnlyTheLayout(t *testing.T) {
	entries, err := filepath.Glob("../../*")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name := filepath.Base(e); !top[name] && !strings.HasPrefix(name, ".") {
			t.Errorf("%s does not belong at the root", filepath.Base(e))
		}
	}
}
