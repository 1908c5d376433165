package browser

import (
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/session"
)

// frameHeight is what the window of Chromium 156 in new headless mode adds
// above the page (tab strip and toolbar), in CSS pixels. A start measures and
// mends it, so another version costs one resize, not a wrong viewport.
const frameHeight = 87

// smallShm is the size of /dev/shm below which Chrome must not rely on it: a
// page's shared buffers then fill it and the tab dies (Debian's wrapper uses
// 3.8 GB, for desktops; container runtimes give 64 MiB).
const smallShm = 256 << 20

// off lists Chrome features that cost an idle machine memory and can do
// nothing in a window that no person looks at (the WebUI omnibox popups keep a
// renderer of about 50 MiB alive for each window), and those that tell Google
// of the forms a page has, or ask it for the time.
var off = []string{
	"WebUIOmniboxPopup", "WebUIOmniboxAimPopup", "WebUIOmniboxFullPopup",
	"MediaRouter", "OptimizationHints", "Translate",
	"AutofillServerCommunication", "NetworkTimeServiceQuerying",
}

// nobody is an address that is refused at once: nothing inside a machine can
// listen on so low a port, and loopback does not go through the proxy.
const nobody = "http://127.0.0.1:9/"

// on lists features: the network service as a thread of the browser process
// saves a process and a hop on every request; on Linux it is not sandboxed
// either way.
var on = []string{"NetworkServiceInProcess2"}

func (c Config) args(v session.Viewport) []string {
	args := []string{
		"--headless=new",
		"--remote-debugging-port=0", // loopback only, whatever is asked (facts.md)
		"--user-data-dir=" + c.Profile,
		"--no-first-run", "--no-default-browser-check",
		// Nothing dials out by itself.
		"--disable-background-networking", "--disable-component-update", "--disable-sync",
		"--disable-domain-reliability", "--disable-breakpad", "--metrics-recording-only",
		// Components that are fetched on demand in spite of the switch above find
		// nobody. (What still goes out is the look for a signed-in account, to
		// accounts.google.com: --gaia-url stops it, but then windows that Chrome
		// opens after the first sometimes refuse their size.)
		"--component-updater=url-source=" + nobody,
		// Only TCP through the proxy leaves the machine; nftables is the wall,
		// these keep pages from waiting for what it rejects.
		"--disable-quic", "--webrtc-ip-handling-policy=disable_non_proxied_udp",
		"--password-store=basic", "--use-mock-keychain",
		"--enable-unsafe-swiftshader", // WebGL without a GPU
		"--hide-crash-restore-bubble", "--noerrdialogs",
		"--disable-features=" + strings.Join(off, ","),
		"--enable-features=" + strings.Join(on, ","),
		fmt.Sprintf("--window-size=%d,%d", v.Width, v.Height+frameHeight),
		fmt.Sprintf("--screen-info={%dx%d}", max(1920, v.Width), max(1080, v.Height+frameHeight)),
	}
	if c.Proxy != "" {
		args = append(args, "--proxy-server="+c.Proxy)
	}
	if shmIsSmall() {
		args = append(args, "--disable-dev-shm-usage")
	}
	if c.NoSandbox {
		args = append(args, "--no-sandbox")
	}
	return append(append(args, c.Flags...), "about:blank")
}

func shmIsSmall() bool {
	var s syscall.Statfs_t
	if err := syscall.Statfs("/dev/shm", &s); err != nil {
		return true
	}
	return uint64(s.Blocks)*uint64(s.Bsize) < smallShm
}

// env is Chrome's whole environment; nothing of the agent's reaches it.
func (c Config) env() []string {
	return []string{
		"HOME=" + c.Home,
		"USER=" + agentlink.UserName, "LOGNAME=" + agentlink.UserName,
		"PATH=/usr/local/bin:/usr/bin:/bin",
		"LANG=C.UTF-8",
		"TMPDIR=/tmp",
		// What Debian's wrapper script sets.
		"CHROME_WRAPPER=/usr/bin/chromium", "CHROME_DESKTOP=chromium.desktop",
		// ANGLE sets this late, while other threads read the environment, and
		// some starts crashed over it; preset it is left alone.
		"VK_ICD_FILENAMES=/usr/lib/chromium/vk_swiftshader_icd.json",
		// There is no bus; without this Chrome looks for one again and again.
		"DBUS_SESSION_BUS_ADDRESS=disabled:",
		"DBUS_SYSTEM_BUS_ADDRESS=disabled:",
		// No Google services: no keys, and no bar on the page that says so.
		"GOOGLE_API_KEY=no", "GOOGLE_DEFAULT_CLIENT_ID=no", "GOOGLE_DEFAULT_CLIENT_SECRET=no",
	}
}

// findBinary gives the path of Chrome's ELF.
func findBinary(path string) (string, error) {
	candidates := []string{"/usr/lib/chromium/chromium", "/usr/bin/chromium"}
	if path != "" {
		candidates = []string{path}
	}
	for _, p := range candidates {
		if _, err := os.Stat(p); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("chrome is not installed: no %s", strings.Join(candidates, " and no "))
}
