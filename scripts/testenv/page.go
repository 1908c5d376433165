package testenv

import (
	"context"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/cdpclient"
)

// FirstPage connects to a session's browser, until the test ends, and attaches
// to its first page.
func FirstPage(t testing.TB, connectURL string) (*cdpclient.Client, *cdpclient.Page) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	cdp, err := cdpclient.Dial(ctx, connectURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cdp.Close() })
	p, err := cdp.FirstPage(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return cdp, p
}
