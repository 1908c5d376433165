package testenv

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Parts say where the things under test are; make test exports them.
type Parts struct {
	Bin        string // BERTH_BIN: folder with gateway, hostd, proxyd and berth
	ImageBase  string // BERTH_IMAGE_BASE: the guest image's root folder
	AgentLayer string // BERTH_AGENT_LAYER: the folder laid over it
	VMFiles    string // BERTH_VM_FILES: kernel, initramfs and disk of microVMs
	VMAgent    string // BERTH_VM_AGENT_LAYER: their AgentLayer, without the race detector
}

// findParts reads the environment; missing lists what is not there, by name.
func findParts() (p Parts, missing []string) {
	p = Parts{Bin: os.Getenv("BERTH_BIN"), ImageBase: os.Getenv("BERTH_IMAGE_BASE"), AgentLayer: os.Getenv("BERTH_AGENT_LAYER"),
		VMFiles: os.Getenv("BERTH_VM_FILES"), VMAgent: os.Getenv("BERTH_VM_AGENT_LAYER")}
	need := func(variable, path string) {
		if os.Getenv(variable) == "" {
			missing = append(missing, "$"+variable)
		} else if _, err := os.Stat(path); err != nil {
			missing = append(missing, fmt.Sprintf("$%s (%v)", variable, err))
		}
	}
	for _, name := range []string{"gateway", "hostd", "hostd-static", "proxyd", "berth"} {
		need("BERTH_BIN", filepath.Join(p.Bin, name))
	}
	need("BERTH_IMAGE_BASE", filepath.Join(p.ImageBase, "etc"))
	need("BERTH_AGENT_LAYER", filepath.Join(p.AgentLayer, "usr/lib/berth/agent"))
	need("BERTH_VM_FILES", filepath.Join(p.VMFiles, "vmlinuz"))
	need("BERTH_VM_AGENT_LAYER", filepath.Join(p.VMAgent, "usr/lib/berth/agent"))
	if os.Geteuid() != 0 {
		missing = append(missing, "root")
	}
	return p, missing
}

// needParts skips on a developer's computer, by name, and fails in CI.
func needParts(t testing.TB) Parts {
	t.Helper()
	p, missing := findParts()
	if len(missing) == 0 {
		return p
	}
	message := "missing: " + strings.Join(missing, ", ") + "; make test brings all of it"
	if os.Getenv("CI") == "true" {
		t.Fatal(message)
	}
	t.Skip(message)
	return p
}
