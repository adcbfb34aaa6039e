sqlite3 c.db 'select count(distinct cost) from t' > answer.txt
